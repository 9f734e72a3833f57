"""`fp4compile verify`: what it checks, and that it finds one wrong bit and says where."""

from __future__ import annotations

import json

import pytest
import torch
from fp4compile.kernels import engines, native, native_operands
from typer.testing import CliRunner

from fp4compile import verify_cases
from fp4compile.cli import app
from fp4compile.verify import Verification, outcome, verify
from fp4compile.verify_cases import Wrong, formats, schemes
from fp4compile.verify_checks import Check, all_checks

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])


def by_name(group: str, name: str) -> Check:
    (found,) = [c for c in all_checks(CPU) if (c.group, c.name) == (group, name)]
    return found


def test_every_format_scheme_and_activation_has_a_check():
    checks = list(all_checks(CPU))
    named = [f"{c.group} {c.name}" for c in checks]
    assert len(named) == len(set(named))
    for fmt in formats():
        group = "gradient" if fmt.stochastic else "quantize"
        if not (fmt.stochastic and fmt.outer == "row"):
            assert any(name.startswith(f"{group} {fmt} ") for name in named), fmt
    for scheme in schemes():
        assert f"layer {scheme}" in named
    assert {str(f.block_scales) for f in formats()} == {"e4m3", "fp8_exact", "None"}


@needs_native
def test_one_wrong_bit_is_found_and_named(monkeypatch):
    check = by_name("quantize", "nvfp4:row:four_over_six to none")
    assert outcome(check, "cpu")["status"] == "pass"
    original = native_operands.quantize_operand

    def planted(x, *rest):
        codes, *others = original(x, *rest)
        if codes.shape == (70, 72):
            codes[41, 7] ^= 0x10
        return codes, *others

    monkeypatch.setattr(native_operands, "quantize_operand", planted)
    found = outcome(check, "cpu")
    assert found["status"] == "fail"
    assert "70 x 144 float32, codes: 1 of 5040 differ, first at [41, 7]" in found["detail"]


@needs_native
@pytest.mark.parametrize(
    ("group", "name", "function"),
    [
        ("decode", "mxfp8:32 to f32, transposed", "decode_operand"),
        ("requantize", "nvfp4:tensor to mxfp8:32:sr in f32", "requantize_operand"),
        ("gradient", "mxfp8:row:sr and mxfp8:row:sr to f32, f32, folded", "gradient_operands"),
    ],
)
def test_a_wrong_value_in_any_primitive_is_found(monkeypatch, group, name, function):
    check = by_name(group, name)
    assert outcome(check, "cpu")["status"] == "pass"
    original = getattr(native_operands, function)

    def planted(*arguments):
        made = original(*arguments)
        first = made[0] if isinstance(made, tuple) else made
        first[-1, 0] += 0.5
        return made

    monkeypatch.setattr(native_operands, function, planted)
    found = outcome(check, "cpu")
    assert found["status"] == "fail" and "operand: " in found["detail"]


def test_a_wrong_gemm_is_found(monkeypatch):
    check = by_name("engine", "reference: fp8-exact low, 64 x 256 x 48")
    assert outcome(check, "cpu")["status"] == "pass"
    original = engines._MATMUL["reference"]

    def planted(*arguments):
        result = original(*arguments)
        result[3, 5] *= 1.01
        return result

    monkeypatch.setitem(engines._MATMUL, "reference", planted)
    assert outcome(check, "cpu")["status"] == "fail"


@needs_native
def test_a_layer_with_another_random_stream_is_found(monkeypatch):
    """The whole layer is held to the reference with the same seed, not to a tolerance of noise."""
    name = next(n for n in schemes() if n.startswith("thinking-machines low"))
    check = by_name("layer", name)
    assert outcome(check, "cpu")["status"] == "pass"
    original = native_operands.gradient_operands

    def planted(*arguments):
        *before, stream = arguments
        return original(*before, stream + 1)

    monkeypatch.setattr(native_operands, "gradient_operands", planted)
    found = outcome(check, "cpu")
    assert found["status"] == "fail" and "dx: " in found["detail"]


def test_a_check_that_breaks_is_an_error_and_leaves_the_others():
    def broken() -> None:
        raise RuntimeError("illegal\nmemory access")

    found = outcome(Check("quantize", "x", broken), "cuda:0")
    assert (found["status"], found["detail"]) == ("error", "RuntimeError: illegal memory access")
    assert outcome(Check("quantize", "x", broken, "no kernel"), "cpu")["status"] == "not run"


def test_nan_and_signs_of_zero_count():
    nan = torch.tensor([float("nan"), 1.0])
    verify_cases.same({"x": (nan, nan.clone())}, "case")
    with pytest.raises(Wrong, match=r"case, x: 1 of 1 differ, first at \[0\]: got -0.0, want 0.0"):
        verify_cases.same({"x": (torch.tensor([-0.0]), torch.tensor([0.0]))}, "case")
    with pytest.raises(Wrong, match="off"):
        verify_cases.near({"x": (nan, nan)}, 1.0, "case")


@needs_native
def test_command(tmp_path, monkeypatch):
    """Exit code and report; what is not run is said. One process: a planted bit reaches it."""
    monkeypatch.setattr("fp4compile.verify.WORKERS", 0)
    out = tmp_path / "report.json"
    arguments = ["verify", "--quick", "--only", "decode mxfp8:row to f32", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    done = {c["name"] for c in data["checks"] if c["device"] == "cpu" and c["status"] == "pass"}
    assert done == {"mxfp8:row to f32", "mxfp8:row to f32, transposed"}
    assert data["machine"]["torch"] == torch.__version__
    missing = {each["what"]: each["why"] for each in data["not_run"]}
    assert missing["timings"] == "--quick"
    if not torch.cuda.is_available():
        assert "no CUDA device" in missing["CUDA kernels, engines on the GPU"]
    original = native_operands.decode_operand
    monkeypatch.setattr(
        native_operands, "decode_operand", lambda *a: original(*a).index_fill(1, torch.tensor(0), 9)
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "first at [0, 0]: got 9.0" in result.output
    result = CliRunner().invoke(app, [*arguments[:2], "--only", "nothing of the kind"])
    assert result.exit_code == 2 and "no check has 'nothing of the kind'" in result.output


def test_report_counts():
    checks = [{"device": "cpu", "group": "layer", "status": s} for s in ("pass", "fail", "error")]
    found = Verification({"checks": checks})
    assert len(found.failed) == 2 and found.counts()["cpu", "layer"]["pass"] == 1


@needs_native
def test_processes_do_the_same():
    """Side by side, with uninitialized memory poisoned."""
    found = verify(quick=True, only="decode mxfp8:row to f32", processes=1)
    assert [c["status"] for c in found.data["checks"] if c["device"] == "cpu"] == ["pass"] * 2
