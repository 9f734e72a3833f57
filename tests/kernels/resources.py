"""Registers, stack and shared memory of the sample kernels, by architecture, beside a golden file.

    python tests/kernels/resources.py     records them for the installed NVRTC

A number of another NVRTC is a bound: at most a fifth more registers, 64 bytes more stack.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from fp4compile.kernels import cuda_loader

GOLDEN = Path(__file__).parent.parent / "data" / "kernel_resources.json"
Usage = dict[str, list[int]]  # by kernel: registers, stack, shared memory
LINE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@cache
def build(file: str, defines: cuda_loader.Defines, arch: str) -> bytes:
    """`cuda_loader.build`, once a process."""
    return cuda_loader.build(file, defines, arch)


class OldTool(Exception):
    """A tool that does not know the architecture yet (Triton 3.6's, sm_103a and sm_121a)."""


@cache
def tool(name: str) -> str | None:
    """A tool of the CUDA toolkit: on the path, or as Triton ships it."""
    if shutil.which(name):
        return shutil.which(name)
    try:
        import triton
    except ImportError:
        return None
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return str(path) if path.exists() else None


def inspect(name: str, *arguments: str, cubin: bytes) -> str:
    """What the tool ``name`` says of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        call = [str(tool(name)), *arguments, file.name]
        done = subprocess.run(call, capture_output=True, text=True)
        if done.returncode and "arch" in done.stderr.lower():
            raise OldTool(f"{name}: {done.stderr.strip().splitlines()[0]}")
        done.check_returncode()
        return done.stdout + done.stderr


def usage(cubin: bytes) -> Usage:
    text = inspect("cuobjdump", "-res-usage", cubin=cubin)
    return {name: [int(n) for n in numbers] for name, *numbers in LINE.findall(text)}


def title(file: str, defines: dict[str, int]) -> str:
    return f"{file} " + " ".join(f"{k}={v}" for k, v in defines.items())


def version() -> str:
    """NVRTC's, with the patch level where the package manager knows it."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return cuda_loader.version()


def golden() -> tuple[dict[str, dict[str, Usage]], bool]:
    """By title and architecture; whether they are of the installed NVRTC."""
    recorded = json.loads(GOLDEN.read_text())
    exact = version() in recorded
    return recorded[version() if exact else max(recorded)], exact


def changes(name: str, arch: str, got: Usage) -> list[str]:
    """What differs from the golden file, a line each."""
    recorded, exact = golden()
    want = recorded.get(name, {}).get(arch)
    if want is None:
        return [f"{name}, {arch}: not in {GOLDEN.name}"]
    found = [f"{name}, {arch}: kernels {sorted(got)}, not {sorted(want)}"] * (set(got) != set(want))
    for kernel in sorted(set(got) & set(want)):
        for i, (what, most) in enumerate((("registers", 1.2), ("stack", 1.0), ("shared", 1.0))):
            new, old = got[kernel][i], want[kernel][i]
            limit = int(old * most) + 64 * (what == "stack")
            if new != old if exact else new > limit:
                found.append(f"{name}, {arch}, {kernel}: {what} {old} -> {new}")
    return found


def record() -> None:
    """Write the golden file's part of the installed NVRTC."""
    from test_cuda_compile import samples

    data = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    found: dict[str, dict[str, Usage]] = {}
    for arch in cuda_loader.ARCHITECTURES:
        for file, defines in samples(arch):
            cubin = build(file, tuple(defines.items()), arch)
            found.setdefault(title(file, defines), {})[arch] = usage(cubin)
    data[version()] = found
    text = json.dumps(data, indent=1)
    GOLDEN.write_text(re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text))
    print(f"{GOLDEN}: NVRTC {version()}, {len(found)} variants")


if __name__ == "__main__":
    record()
