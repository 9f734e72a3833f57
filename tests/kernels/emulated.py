"""Stands in for the CUDA loader: compiles the kernels for the host and runs them on CPU tensors."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache as cache_function
from pathlib import Path

from fp4compile.kernels import cache, cuda_kernels, cuda_loader
from fp4compile.kernels.native_library import compiler

HERE = Path(__file__).parent
KERNELS = {
    "rows.cu": {"quantize_rows": "Rows"},
    "blocks.cu": {"term_amax": "Blocks", "quantize_blocks": "Blocks"},
    "columns.cu": {"columns_amax": "Columns", "quantize_columns": "Columns"},
    "tensors.cu": {"tensor_amax": "Amax", "quantize_tiles": "Tiles", "add_chunks": "Sums"},
    "fp8.cu": {"quantize_fp8": "Fp8"},
    "turned.cu": {"turn_tiles": "Turned"},
    "hidden.cu": {"hidden_gradient": "Hidden"},
    "gradient.cu": {
        "gradient_amax": "Gradient",
        "quantize_gradient": "Gradient",
    },
    "transposes.cu": dict.fromkeys(
        ("decode_rows", "decode_transpose", "requantize_amax", "requantize_transpose"), "Saved"
    ),
}
order = 0  # 1: the threads of a CTA run backwards


@cache_function
def library(file: str, defines: cuda_loader.Defines) -> ctypes.CDLL:
    launchers = "".join(f"FP4_LAUNCHER({k}, {a})\n" for k, a in KERNELS[file].items())
    text = f'#include "{file}"\n{launchers}'
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-DFP4_EMULATE"]
    flags += [f"-D{name}={value}" for name, value in defines]
    sources = [(cuda_loader.HERE / n).read_bytes() for n in (file, *cuda_loader.HEADERS)]
    sources += [(HERE / name).read_bytes() for name in ("emulate.h", "ptx_model.h")]
    name = f"emulated-{cache.key(text, *flags, *sources)}"

    def build() -> bytes:
        path = cache.private_directory() / name
        path.with_suffix(".cpp").write_text(text)
        include = ["-I", str(cuda_loader.HERE), "-I", str(HERE)]
        call = [*compiler(), *flags, *include, str(path.with_suffix(".cpp")), "-o", str(path)]
        subprocess.run(call, check=True)
        return path.read_bytes()

    return ctypes.CDLL(str(cache.fetch(name + ".so", build)))


def launch(file, kernel, defines, arguments, grid, threads, device, shared=0) -> None:
    function = getattr(library(file, defines), f"launch_{kernel}")
    assert function(ctypes.byref(arguments), *grid, threads, order) == 0, "threads miss a barrier"


def install(monkeypatch) -> None:
    monkeypatch.setattr(cuda_loader, "launch", launch)
    monkeypatch.setattr(cuda_loader, "resident", lambda *arguments: 3)
    assert cuda_kernels.cuda_loader is cuda_loader
