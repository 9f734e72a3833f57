"""Every usual variant compiles for every architecture; no GPU is needed, NVRTC is."""

from __future__ import annotations

import os
from pathlib import Path

import emulated
import pytest
import resources
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
        "rows.cu",
        {"XD": 1, "MODE": 0, "OPERAND": 0, "ACT": 2, "GATED": 0, "TERM": 3, "UP": 0, "BLOCKS": 4,
         "WIDE": 1, "STAGES": 2, "CTAS": 1, "THREADS": 512, "FULL": 1},
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
         "SWIZZLE": 0, "BIG": 0, "ACROSS": 2},
    ),
    (
        "columns.cu",
        {"XD": 1, "MX": 0, "SR": 1, "ROT": 16, "FORM": 2, "FOLD": 0, "SUMS": 1, "ALIGNED": 1,
         "SWIZZLE": 0, "BIG": 0, "ACROSS": 2},
    ),
    (
        "columns.cu",
        {"XD": 1, "MX": 1, "SR": 1, "ROT": 32, "FORM": 2, "FOLD": 0, "SUMS": 0, "ALIGNED": 1,
         "SWIZZLE": 0, "BIG": 0, "ACROSS": 2},
    ),
    ("tensors.cu", {"XD": 1, "OPERAND": 2}),
    (
        "gradient.cu",
        {"XD": 1, "SUMS": 1, "DMODE": 1, "WMODE": 1, "DFORM": 1, "WFORM": 1, "FOLD": 1,
         "DSR": 1, "WSR": 1, "ALIGNED": 1, "BIG": 0, "ACROSS": 2},
    ),
    (
        "gradient.cu",
        {"XD": 1, "SUMS": 1, "DMODE": 2, "WMODE": 2, "DFORM": 2, "WFORM": 2, "FOLD": 0,
         "DSR": 1, "WSR": 1, "ALIGNED": 1, "BIG": 0, "ACROSS": 2},
    ),
    (
        "gradient.cu",
        {"XD": 1, "SUMS": 1, "DMODE": 2, "WMODE": 2, "DFORM": 2, "WFORM": 2, "FOLD": 0,
         "DSR": 0, "WSR": 0, "ALIGNED": 1, "BIG": 0, "ACROSS": 2},
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
# The same of operands for block-scaled tensor cores.
SCALED_SAMPLE = (
    (
        "rows.cu",
        {"XD": 1, "MODE": 0, "OPERAND": 3, "ACT": 1, "GATED": 0, "TERM": 3, "UP": 0, "BLOCKS": 2,
         "WIDE": 1, "STAGES": 2, "CTAS": 2, "THREADS": 128, "FULL": 1},
    ),
    (
        "rows.cu",
        {"XD": 1, "MODE": 3, "OPERAND": 3, "ACT": 0, "GATED": 0, "TERM": 0, "UP": 0, "BLOCKS": 2,
         "WIDE": 1, "STAGES": 2, "CTAS": 2, "THREADS": 128, "FULL": 1},
    ),
    ("tensors.cu", {"XD": 1, "OPERAND": 3}),
    (
        "gradient.cu",
        {"XD": 1, "SUMS": 1, "DMODE": 2, "WMODE": 2, "DFORM": 3, "WFORM": 3, "FOLD": 0,
         "DSR": 1, "WSR": 1, "ALIGNED": 1, "BIG": 0, "ACROSS": 2},
    ),
    ("transposes.cu", {"SOURCE": 0, "FORM": 3, "MODE": 2, "SR": 1, "FACTOR": 1, "BIG": 0, "ACROSS": 1}),
    (
        "blocks.cu",
        {"XD": 1, "MX": 0, "SR": 1, "CODES": 0, "OPERAND": 3, "ACT": 0, "GATED": 0, "TERM": 0,
         "UP": 0, "WIDE": 1, "BIG": 0},
    ),
    *(
        (
            "columns.cu",
            {"XD": 1, "MX": 0, "SR": sr, "ROT": 16, "FORM": form, "SWIZZLE": 1 - sr, "FOLD": 0,
             "SUMS": sr, "ALIGNED": 1, "BIG": 0, "ACROSS": 2},
        )
        for sr, form in ((1, 3), (0, 0))
    ),
    ("turned.cu", {}),
)
BLACKWELL = cuda_variants.BLOCK_SCALED
# Conversions in machine code: what the disassembler calls them.
INSTRUCTIONS = {
    "e2m1": "F2FP.SATFINITE.E2M1.F32",
    "e4m3": "F2FP.SATFINITE.E4M3.F32",
    "ue8m0": "F2FP.SATFINITE.E8.F32.PACK_AB_MERGE_C.RP",
}


def samples(arch: str) -> tuple[tuple[str, dict[str, int]], ...]:
    return SAMPLE + SCALED_SAMPLE * (arch in BLACKWELL)


@needs_nvrtc
@pytest.mark.parametrize("arch", cuda_loader.ARCHITECTURES)
def test_compiles(arch: str) -> None:
    """Into kernels that need what the golden file says: python tests/kernels/resources.py."""
    everything = os.environ.get("FP4COMPILE_TEST_ALL") == "1"
    variants = cuda_variants.variants(block_scaled=arch in BLACKWELL)
    found = []
    for file, defines in samples(arch):
        cubin = resources.build(file, tuple(defines.items()), arch)
        assert cubin[:4] == b"\x7fELF"
        if resources.tool("cuobjdump"):
            name = resources.title(file, defines)
            found += resources.changes(name, arch, resources.usage(cubin))
    assert not found, "\n".join(found)
    for file, defines in variants if everything else ():
        assert cuda_loader.build(file, tuple(defines.items()), arch)[:4] == b"\x7fELF"


@needs_nvrtc
@pytest.mark.skipif(resources.tool("nvdisasm") is None, reason="no disassembler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", *BLACKWELL])
def test_machine_code_converts_by_instruction(arch: str) -> None:
    """E2M1 and E8M0 on Blackwell, E4M3 from sm_89 on, none before, and nowhere by .rs."""
    code = {}
    for name, sample in (("nvfp4", SCALED_SAMPLE[0]), ("mxfp8", SCALED_SAMPLE[1])):
        file, defines = sample
        cubin = resources.build(file, tuple(defines.items()), arch)
        try:
            code[name] = resources.inspect("nvdisasm", "-c", cubin=cubin)
        except resources.OldTool as old:
            pytest.skip(str(old))
    native = arch in BLACKWELL
    assert (INSTRUCTIONS["e2m1"] in code["nvfp4"]) == native
    assert code["nvfp4"].count(INSTRUCTIONS["e2m1"]) >= 16 * native  # two blocks of 16, in pairs
    assert (INSTRUCTIONS["ue8m0"] in code["mxfp8"]) == native
    assert (INSTRUCTIONS["e4m3"] in code["mxfp8"]) == (arch != "sm_80")
    assert not any(".RS" in line for c in code.values() for line in c.splitlines() if "F2FP" in line)


def test_nothing_spills() -> None:
    """A row or a tile lives in registers: local memory would be read and written for each.

    Gradients may keep a few words there that their slow copy of the loop reads; for Blackwell NVRTC
    13.0 keeps more. `test_compiles` holds kernels to the golden file that is looked at here.
    """
    limits = {"gradient.cu": (32, 160), "transposes.cu": (8, 32), "blocks.cu": (0, 48)}
    for name, by_arch in resources.golden()[0].items():
        for arch, kernels in by_arch.items():
            most = limits.get(name.split()[0], (0, 0))[arch in BLACKWELL]
            assert max(stack for _, stack, _ in kernels.values()) <= most, (name, arch, kernels)


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
    monkeypatch.setattr(cuda_variants, "variants", lambda widths, block_scaled: [SAMPLE[3]])
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
    g, seed = torch.zeros(64, 4096, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    mx = TensorFormat.parse("mxfp8:32:sr")
    nvfp4, rows = TensorFormat.parse("nvfp4:row:four_over_six"), TensorFormat.parse("mxfp8:32")
    cuda_kernels.quantize(x, TensorFormat.parse("nvfp4:row:fp8_exact:half"), "fp4")
    cuda_kernels.quantize(x, TensorFormat.parse("nvfp4:tensor:tile"), "fp4")
    cuda_kernels.quantize(x, rows, "mx")
    codes, scales, factor, _ = cuda_kernels.quantize(x, nvfp4, "fp4")
    cuda_kernels.requantize(codes, scales, factor, nvfp4, 4096, mx, "mx", seed, 0)
    cuda_kernels.quantize_grad(g, None, mx, mx, "mx", "mx", False, seed, 0)
    known = {tuple(sorted(d.items())) for _, d in cuda_variants.variants(block_scaled=True)}
    assert len(asked) > 16
    assert all(tuple(sorted(d)) in known for d in asked if dict(d).get("OPERAND") != 0)


def test_rows_in_flight_fit_into_shared_memory() -> None:
    """Hopper holds 32,768 columns of BF16 twice; a smaller GPU once, or reads rows twice."""
    for mode, same, block, most, want in (
        (0, False, 32, 219 << 10, (512, 4, 2)), (0, False, 32, 91 << 10, (512, 4, 1)),
        (0, False, 64, 219 << 10, (512, 4, 1)), (0, False, 64, 91 << 10, (512, 0, 1)),
        (0, True, 32, 91 << 10, (512, 4, 1)),
    ):  # fmt: skip
        team, defines = cuda_kernels.row_team(32768, mode, same, block, most)
        assert (team.threads, team.held, team.stages) == want
        assert team.held * team.threads * team.stages * block <= most and team.ctas == 1
        assert defines["FULL"] == int(team.held > 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_one_line() -> None:
    found, reason = cuda_loader.available()
    assert not found and reason and "\n" not in reason


def test_architectures() -> None:
    names = [
        cuda_loader.architecture(c)
        for c in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
    ]
    assert tuple(names) == cuda_loader.ARCHITECTURES
