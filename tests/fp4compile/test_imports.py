"""Imports go downward only (front door, passes, kernels), and importing the package is cheap."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOMS = {  # a room and the rooms that it may import
    "fp4compile": ("fp4compile", "fp4compile.passes", "fp4compile.kernels"),
    "fp4compile.passes": ("fp4compile.passes", "fp4compile.kernels"),
    "fp4compile.kernels": ("fp4compile.kernels",),
}
# What the passes may know of the kernels: operator names and format descriptions; for the cost
# model, which formats have a kernel on GPUs and which engine multiplies two.
PASSES_MAY = {
    "fp4compile.kernels", "fp4compile.kernels.formats", "fp4compile.kernels.ops",
    "fp4compile.kernels.errors", "fp4compile.kernels.cuda_operands",
    "fp4compile.kernels.engines", "fp4compile.kernels.block_scaled",
}  # fmt: skip


def files(room):
    root = Path(next(iter(importlib.import_module(room).__path__)))
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if inner.parts[0] in ("passes", "kernels") and room == "fp4compile":
            continue
        yield path, ".".join((room, *inner.with_suffix("").parts)).removesuffix(".__init__")


def imported(path, module):
    """The package's own modules that a file imports, inside functions as well."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def room_of(name):
    found = [room for room in ROOMS if name == room or name.startswith(room + ".")]
    return max(found, key=len, default=None)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_downward(room):
    seen = 0
    for path, module in files(room):
        for name in imported(path, module):
            target = room_of(name)
            if target is not None and name != "fp4compile":
                seen += 1
                assert target in ROOMS[room], f"{path.name}: {name}"
    assert seen


def test_the_passes_know_names_and_formats_only():
    for path, module in files("fp4compile.passes"):
        for name in imported(path, module):
            if room_of(name) == "fp4compile.kernels":
                known = any(name == m or name.startswith(m + ".") for m in PASSES_MAY - {"fp4compile.kernels"})
                assert known or name == "fp4compile.kernels", f"{path.name}: {name}"


def loaded(code, *names):
    """Which of ``names`` are loaded after ``code`` ran in a fresh interpreter."""
    check = f"\nimport sys\nprint([n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


HEAVY = (
    "torch._inductor", "torch._dynamo", "yaml", "pydantic", "rich", "typer", "cuda.bindings",
    "matplotlib", "numpy.random", "sympy",
)  # fmt: skip


def test_importing_the_package_is_cheap():
    own = [f"fp4compile.{name}" for name in ("policy", "backend", "kernels", "passes", "report")]
    assert loaded("import fp4compile; dir(fp4compile)", "torch", *HEAVY, *own) == []


def test_quantizing_needs_no_compiler_and_no_yaml():
    code = "import fp4compile, torch; fp4compile.quantize(torch.ones(2, 32), 'nvfp4').dequantize()"
    names = ("torch._inductor", "torch._dynamo", "yaml", "pydantic", "rich", "typer")
    assert loaded(code, *names) == []


def test_a_policy_needs_no_inductor():
    code = "import fp4compile; fp4compile.Policy.recipe('mxfp8')"
    assert loaded(code, "torch._inductor", "torch._dynamo", "rich", "typer") == []


def test_the_command_line_prints_help_without_torch():
    code = "import fp4compile.cli"
    assert loaded(code, "torch", "pydantic", "yaml") == []
