"""Every usual variant compiles for every architecture; no GPU is needed, NVRTC is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import emulated
import pytest
import torch
from fp4compile.kernels import cuda_fourbit, cuda_kernels, cuda_loader, cuda_variants
from fp4compile.kernels.formats import TensorFormat
from typer.testing import CliRunner

from fp4compile.cli import app

FOUND, REASON = cuda_loader.compiler_available()
needs_nvrtc = pytest.mark.skipif(not FOUND, reason=REASON)
# One of each family, the largest, for every architecture; all variants with FP4COMPILE_TEST_ALL=1.
SAMPLE = (
    (
        "rows.cu",
        {"XD": 1, "MODE": 5, "OPERAND": 1, "ACT": 1, "GATED": 0, "TERM": 11, "UP": 0, "BLOCKS": 2,
         "WIDE": 1, "STAGES": 2, "CTAS": 2, "THREADS": 128, "FULL": 1},
    ),
    (
        "rows.cu",
        {"XD": 1, "MODE": 2, "OPERAND": 1, "ACT": 0, "GATED": 0, "TERM": 0, "UP": 0, "BLOCKS": 2,
         "WIDE": 1, "STAGES": 2, "CTAS": 1, "THREADS": 128, "FULL": 1},
    ),
    (
        "rows.cu",
        {"XD": 0, "MODE": 1, "OPERAND": 2, "ACT": 5, "GATED": 1, "TERM": 3, "UP": 3, "BLOCKS": 0,
         "WIDE": 0, "STAGES": 1, "CTAS": 1, "THREADS": 0, "FULL": 0},
    ),
    (
        "rows.cu",
        {"XD": 2, "MODE": 4, "OPERAND": 2, "ACT": 1, "GATED": 0, "TERM": 1, "UP": 0, "BLOCKS": 1,
         "WIDE": 0, "STAGES": 1, "CTAS": 2, "THREADS": 64, "FULL": 0},
    ),
    (
        "blocks.cu",
        {"XD": 1, "MX": 0, "SR": 1, "CODES": 0, "OPERAND": 2, "ACT": 0, "GATED": 0, "TERM": 0,
         "UP": 0, "WIDE": 1, "BIG": 0},
    ),
    (
        "blocks.cu",
        {"XD": 0, "MX": 1, "SR": 0, "CODES": 1, "OPERAND": 2, "ACT": 5, "GATED": 1, "TERM": 3,
         "UP": 11, "WIDE": 0, "BIG": 0},
    ),
    (
        "columns.cu",
        {"XD": 1, "MX": 0, "SR": 0, "ROT": 16, "FORM": 0, "FOLD": 0, "SUMS": 0, "ALIGNED": 1,
         "BIG": 0, "ACROSS": 2},
    ),
    (
        "columns.cu",
        {"XD": 1, "MX": 0, "SR": 1, "ROT": 16, "FORM": 2, "FOLD": 0, "SUMS": 1, "ALIGNED": 1,
         "BIG": 0, "ACROSS": 2},
    ),
    (
        "columns.cu",
        {"XD": 1, "MX": 1, "SR": 1, "ROT": 32, "FORM": 2, "FOLD": 0, "SUMS": 0, "ALIGNED": 1,
         "BIG": 0, "ACROSS": 2},
    ),
    ("tensors.cu", {"XD": 1, "OPERAND": 2}),
    (
        "gradient.cu",
        {"XD": 1, "SUMS": 1, "DMODE": 1, "WMODE": 1, "DFORM": 1, "WFORM": 1, "FOLD": 1,
         "ALIGNED": 1, "BIG": 0, "ACROSS": 2},
    ),
    (
        "gradient.cu",
        {"XD": 1, "SUMS": 1, "DMODE": 2, "WMODE": 2, "DFORM": 2, "WFORM": 2, "FOLD": 0,
         "ALIGNED": 1, "BIG": 0, "ACROSS": 2},
    ),
    (
        "hidden.cu",
        {"XD": 1, "ZD": 1, "ACT": 1, "GATED": 0, "GT": 3, "ZT": 11, "UT": 0, "AMAX": 1, "FOLD": 1,
         "ALIGNED": 1},
    ),
    (
        "hidden.cu",
        {"XD": 1, "ZD": 1, "ACT": 5, "GATED": 1, "GT": 3, "ZT": 3, "UT": 3, "AMAX": 1, "FOLD": 3,
         "ALIGNED": 1},
    ),
    *(
        (
            "fp8.cu",
            {"XD": 1, "SAVED": saved, "ACT": act, "GATED": gated, "TERM": 0, "UP": 0,
             "ALONG": along, "ACROSS": across, "SUMS": across - saved, "SR": 0, "FULL": full},
        )
        for saved, act, gated, along, across, full in (
            (0, 5, 1, 1, 0, 1), (0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 0), (1, 0, 0, 0, 1, 1)
        )
    ),
    ("transposes.cu", {"SOURCE": 0, "FORM": 1, "MODE": 1, "SR": 1, "FACTOR": 1, "BIG": 0, "ACROSS": 1}),
    ("transposes.cu", {"SOURCE": 1, "FORM": 2, "MODE": 2, "SR": 0, "FACTOR": 0, "BIG": 0, "ACROSS": 1}),
)


@needs_nvrtc
@pytest.mark.parametrize("arch", cuda_loader.ARCHITECTURES)
def test_compiles(arch: str) -> None:
    everything = os.environ.get("FP4COMPILE_TEST_ALL") == "1"
    for file, defines in cuda_variants.variants() if everything else SAMPLE:
        cubin = cuda_loader.build(file, tuple(defines.items()), arch)
        assert cubin[:4] == b"\x7fELF"


@needs_nvrtc
def test_nothing_spills(tmp_path: Path) -> None:
    """A row or a tile lives in registers: local memory would be read and written for each.

    Gradients may keep a few words there that their slow copy of the loop reads.
    """
    tool = shutil.which("cuobjdump")
    if tool is None:
        triton = pytest.importorskip("triton")
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    for file, defines in SAMPLE:
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cuda_loader.build(file, tuple(defines.items()), "sm_90a"))
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True)
        lines = [line for line in (usage.stdout + usage.stderr).splitlines() if "STACK:" in line]
        stacks = [int(line.split("STACK:")[1].split()[0]) for line in lines]
        most = 32 if file == "gradient.cu" else 0
        assert stacks and max(stacks) <= most, (file, lines)


@needs_nvrtc
def test_cubins_are_kept_and_a_bad_source_is_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FP4COMPILE_CACHE_DIR", str(tmp_path))
    file, defines = "tensors.cu", (("XD", 1), ("OPERAND", 0))
    first = cuda_loader.cubin(file, defines, "sm_90a")
    monkeypatch.setattr(cuda_loader, "build", lambda *a: pytest.fail("built twice"))
    assert cuda_loader.cubin(file, defines, "sm_90a") == first
    monkeypatch.undo()
    with pytest.raises(cuda_loader.EngineError, match="tensors.cu for sm_90a: .*error") as raised:
        cuda_loader.build(file, (("XD", 77),), "sm_90a")
    assert "\n" not in str(raised.value)


@needs_nvrtc
def test_warmup_fills_the_cache_with_what_a_run_asks_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FP4COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_variants, "variants", lambda widths: [SAMPLE[3]])
    result = CliRunner().invoke(app, ["warmup", "--arch", "sm_90a"])
    assert result.exit_code == 0 and "sm_90a: 1 kernels" in result.output
    monkeypatch.setattr(cuda_loader, "build", lambda *a: pytest.fail("built again"))
    file, defines = SAMPLE[3]
    cuda_loader.cubin(file, tuple(reversed(defines.items())), "sm_90a")


def test_row_variants_are_those_of_the_launch(monkeypatch) -> None:
    """What `variants` names is what `quantize` asks the loader for."""
    asked = []
    emulated.install(monkeypatch)
    monkeypatch.setattr(cuda_loader, "launch", lambda f, k, defines, *rest: asked.append(defines))
    x = torch.zeros(2, 4096, dtype=torch.bfloat16)
    cuda_kernels.quantize(x, TensorFormat.parse("nvfp4:row:fp8_exact:half"), "e4m3")
    for text in ("nvfp4:tensor", "mxfp4"):
        fmt, drawn = (TensorFormat.parse(text + end) for end in ("", ":sr"))
        cuda_fourbit.quantize(x, fmt, "bf16")
        cuda_fourbit.row_gradient(x, drawn, "bf16", x, 0)
    cuda_fourbit.quantize_transposed(x, TensorFormat.parse("nvfp4:tensor:had16"))
    drawn = TensorFormat.parse("mxfp4:sr:had32")
    cuda_fourbit.column_gradient(x, None, drawn, "bf16", True, x, 0)
    known = {tuple(sorted(d.items())) for _, d in cuda_variants.variants()}
    assert len(asked) > 8 and all(tuple(sorted(d)) in known for d in asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_one_line() -> None:
    found, reason = cuda_loader.available()
    assert not found and reason and "\n" not in reason


def test_architectures() -> None:
    names = [
        cuda_loader.architecture(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
    ]
    assert tuple(names) == cuda_loader.ARCHITECTURES
