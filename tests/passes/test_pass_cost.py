"""The cost model against measured steps, and what its expressions must obey."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fp4compile.kernels import engines
from fp4compile.kernels.formats import GEMMS, Scheme
from fp4compile.passes import cost, machines
from fp4compile.passes.cost import K, M, N
from fp4compile.passes.machines import MACHINES

from fp4compile.bench import predicting
from fp4compile.policy import Policy, recipes

H200, B200 = MACHINES["H200"], MACHINES["B200"]
RESULTS = Path(__file__).parents[2] / "docs" / "results"
MLP = json.loads((RESULTS / "h200-mlp.json").read_text())
GPT = json.loads((RESULTS / "h200-gpt.json").read_text())
ARMS = ("bf16", "fp8-exact", "thinking-machines")
EXACT = Policy.recipe("fp8-exact").schemes["low"]


def mlp(arm: str, machine=H200) -> list[cost.Step]:
    scheme = predicting.low(arm)
    return cost.chain((scheme, scheme), machine)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("d", [2048, 4096, 8192])
def test_predictions_are_within_15_percent_of_the_measured_step(arm, d):
    (row,) = [r for r in MLP["rows"] if (r["d"], r["arm"]) == (d, arm)]
    predicted = cost.milliseconds(mlp(arm), H200, MLP["tokens"], d, 4 * d)
    assert abs(predicted / row["ms"] - 1) < 0.15


# fp8-block, H200, torch 2.11, beside BF16's 10.44 and 40.67.
FP8_BLOCK = {2048: 7.776, 4096: 28.511}


@pytest.mark.parametrize("d", FP8_BLOCK)
def test_fp8_block_is_within_15_percent_of_the_measured_step(d):
    predicted = cost.milliseconds(mlp("fp8-block"), H200, 32768, d, 4 * d)
    assert abs(predicted / FP8_BLOCK[d] - 1) < 0.15


@pytest.mark.parametrize("arm", ["bf16", "fp8-exact"])
def test_a_gpt_is_within_15_percent_of_the_measured_step(arm):
    (row,) = [r for r in GPT["rows"] if r["arm"] == arm]
    steps = predicting.gpt(predicting.low(arm), H200, 2048, 12, 1024, 32768, 32768)
    assert abs(1e3 * cost.seconds(steps, H200) / row["ms"] - 1) < 0.15


@pytest.mark.parametrize(("search", "words"), [(None, "plain"), ("four_over_six", "four over six")])
def test_gelu_with_quantize_is_within_15_percent_of_the_measured_kernel(search, words):
    """32,768 x 32,768 on an H200, a GEMM's factors included."""
    measured = json.loads((RESULTS / "h200-verify-timings.json").read_text())["timings"]
    (row,) = [r for r in measured if r["what"] == f"gelu_tanh + quantize, {words}"]
    assert abs(predicting.gelu_quantize(H200, search) / row["ms"] - 1) < 0.15


def test_the_articles_whole_steps():
    """1.18, 1.28 and 1.38 x BF16's speed at three widths: within 10 %, and in this order."""
    gains = []
    for d, measured in predicting.ARTICLE.items():
        row = predicting.step_row(B200, d)
        gains.append(row["bf16"] / row["thinking-machines"])
        assert abs(gains[-1] / measured - 1) < 0.10
    assert gains == sorted(gains)


def test_the_articles_mlp_layer_on_a_b200():
    """Forward and backward 28 + 55 ms in BF16, 11 + 31 by the recipe."""
    base, recipe = (
        cost.milliseconds(mlp(arm, B200), B200, 32768, 8192, 32768) for arm in (ARMS[0], ARMS[2])
    )
    assert abs(base / 83 - 1) < 0.15 and abs(recipe / 42 - 1) < 0.15


@pytest.mark.parametrize("name", [name for name in recipes() if name != "bf16"])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_every_scheme_has_three_gemms_of_the_same_operations(name, machine):
    for scheme in Policy.recipe(name).schemes.values():
        steps = cost.linear(scheme, machine)
        gemms = [step for step in steps if step.rate]
        assert len(gemms) == 3
        assert {(step.operations - 2 * M * K * N).expand() for step in gemms} == {0}
        assert [step.backward for step in steps] == sorted(step.backward for step in steps)


def test_steps_of_a_layer_are_those_of_the_operators():
    """fp8-exact on an H200: bytes as expressions, in the order of the kernels."""
    made = [(step.name, step.bytes) for step in cost.linear(EXACT, H200) if not step.rate]
    want = [
        ("quantize x", 3.5625 * M * K),  # BF16 in, codes, scales, E4M3
        ("quantize weight", 5.5625 * N * K),  # read twice: one maximum for all
        ("factors of y", 4 * M * N),
        ("quantize g", 6 * M * N),  # read for the maxima, and for both orientations
        ("decode activation", 1.5625 * M * K),
        ("factors of dw", 4 * N * K),
        ("decode weight", 1.5625 * N * K),
        ("factors of dx", 4 * M * K),
    ]
    assert [name for name, _ in made] == [name for name, _ in want]
    for (name, moved), (_, expected) in zip(made, want):
        assert (moved - expected).expand() == 0, name


def test_a_chain_fuses_the_activation_and_gate_and_up_share_their_input():
    names = [step.name for step in cost.chain((EXACT,) * 3, H200)]
    assert names.count("quantize x") == 1 and names.count("activation, quantize") == 1
    assert names.count("GEMM fprop") == 3 and names.count("sum of dx") == 1
    kept = Policy.from_dict({"version": 1, "save_preactivation": "mxfp8"}).schemes["low"]
    names = [step.name for step in cost.chain((kept, kept), H200)]
    assert names.count("keep z") == names.count("decode z") == 1


def test_fewer_bits_move_fewer_bytes():
    """Everything but the GEMMs of fp8-exact moves less than the other recipe's."""
    sizes = {M: 32768, K: 4096, N: 16384}
    moved = [
        float(sum(step.bytes for step in mlp(arm) if not step.rate).subs(sizes)) for arm in ARMS[1:]
    ]
    assert moved[0] < moved[1]


def test_blackwell_gains_more_from_wider_layers():
    gains = []
    for d in (512, 2048, 4096, 8192):
        base, low = (
            cost.milliseconds(mlp(arm, B200), B200, 32768, d, 4 * d) for arm in (ARMS[0], ARMS[2])
        )
        gains.append(base / low)
    assert gains == sorted(gains) and gains[0] < 1.1 and gains[-1] > 1.5


def test_a_format_without_a_kernel_is_dear():
    """PyTorch's reference on a GPU is no small extra."""
    fast = predicting.low("thinking-machines")
    slow = Scheme.parse(str(fast).replace("four_over_six", "search=1/1.5"))
    each = [cost.seconds(cost.linear(s, H200, 32768, 4096, 4096), H200) for s in (fast, slow)]
    assert each[1] > 2 * each[0]


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "H200"), ((8, 9), None)], ids=["H200", "none"]
)
def test_engines_are_those_of_the_machine(monkeypatch, capability, name):
    """On Hopper the model's table chooses as `engines.choose` does, for every recipe's GEMM."""
    assert machines.of_device("NVIDIA H200").name == "H200"
    assert machines.of_device("NVIDIA L40S") is None
    if name is None:
        return
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for recipe in recipes():
        for scheme in Policy.recipe(recipe).schemes.values():
            costs = cost.Costs(scheme, MACHINES[name], 1, 1, 1, 2)
            for gemm in GEMMS:
                if getattr(scheme, gemm) is None:
                    continue
                pair = costs.format(gemm, 0), costs.format(gemm, 1)
                if "fp8" in [fmt.format for fmt in pair]:
                    continue  # its engine needs a build of PyTorch for CUDA
                chosen = engines.choose(*pair, torch.device("cuda"))
                assert costs.engine(gemm) == chosen.name, (recipe, gemm)


def test_blackwell_runs_four_bits_where_codes_are_read_as_they_lie():
    costs = cost.Costs(predicting.low("thinking-machines"), B200, 1, 1, 1, 2)
    assert [costs.engine(gemm) for gemm in GEMMS] == ["fp4", "mxfp8", "mxfp8"]
    costs = cost.Costs(EXACT, B200, 1, 1, 1, 2)
    assert [costs.engine(gemm) for gemm in GEMMS] == ["fp4", "mxfp8", "mxfp8"]
    costs = cost.Costs(predicting.low("nvidia"), B200, 1, 1, 1, 2)
    assert [costs.engine(gemm) for gemm in GEMMS] == ["fp4", "fp4", "fp4"]


def test_unknown_machines_are_named():
    with pytest.raises(Exception, match="unknown machine 'H2000' .known: H200, B200"):
        machines.named("H2000")
    assert machines.named(" rtx 5090").name == "RTX 5090"
