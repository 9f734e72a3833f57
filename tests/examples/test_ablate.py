"""The ablation: its arms, equal data and weights, runs in pieces, and what is written of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import ablate  # noqa: E402
from train_gpt import GPT  # noqa: E402

import fp4compile as fp4  # noqa: E402

ablate.CURVE_BATCHES, ablate.FINAL_BATCHES = 1, 2
ARMS = Path(ablate.__file__).with_name("ablations.yaml")
TINY = "--layers 2 --width 16 --context 16 --batch 2 --steps 8 --device cpu"


def run(out, arms, *rest):
    ablate.main([*TINY.split(), "--out", str(out), "--arms", str(arms), "--data", ablate.__file__, *rest])
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    path = tmp_path_factory.mktemp("arms") / "arms.yaml"
    path.write_text("""
arms:
  - {name: high precision}
  - {name: chance, group: g, perturb: 1.0e-3}
  - {name: low, group: g, recipe: fp8-exact}
  - {name: late, group: late switch of low, recipe: fp8-exact, phases: [{from_step: 75%, fprop: original}]}
""")
    return path


@pytest.fixture(scope="module")
def made(arms, tmp_path_factory):
    out = tmp_path_factory.mktemp("ablation")
    torch._dynamo.reset()
    return out, run(out, arms, "--seeds", "2")


def scheme(name, layer="blocks.0.mlp.up", step=None):
    (arm,) = [arm for arm in ablate.load_arms(ARMS) if arm["name"] == name]
    policy = fp4.Policy.from_dict(arm["policy"]).for_steps(1000)
    model = GPT(6, 64, 16, torch.Generator().manual_seed(0))
    return str(policy.resolve(model, step)[layer].chain.scheme)


def test_each_arm_of_nvidia_lacks_one_technique():
    full = scheme("nvidia")
    assert full == (
        "fprop(nvfp4:tensor, nvfp4:tensor:tile) dgrad(nvfp4:tensor:sr, fprop)"
        " wgrad(nvfp4:tensor:sr:had16, input>nvfp4:tensor:had16)"
    )
    assert scheme("without stochastic rounding") == full.replace(":sr", "")
    assert scheme("without Hadamard") == full.replace(":had16", "")
    assert scheme("without tiles") == full.replace(":tile", "").replace("sr, fprop", "sr, input>nvfp4:tensor")
    last = "blocks.5.attn.qkv"
    assert scheme("nvidia", last) == "original" and scheme("without BF16 blocks", last) == full


def test_the_other_arms_are_what_they_are_called():
    assert scheme("nvfp4 in mxfp4's scheme") == scheme("mxfp4").replace("mxfp4", "nvfp4:tensor")
    assert scheme("nearest backward") == scheme("thinking-machines").replace(":sr", "")
    late = "forward original from 82%"
    assert scheme(late, step=819) == scheme("nvidia") and "fprop(original)" in scheme(late, step=820)
    assert "dgrad(original) wgrad(original)" in scheme("backward original from 82%", step=820)
    assert scheme("all original from 82%", step=820) == "original"


def test_arms_share_weights_and_batches_and_differ_by_seed(made):
    out, runs = made
    first = {(r["arm"], r["seed"]): r["train_loss"][0] for r in runs}
    assert len(runs) == 8
    for seed in (0, 1):
        high = first["high precision", seed]
        assert first["low", seed] == pytest.approx(high, abs=0.1)
        assert first["chance", seed] == pytest.approx(high, abs=1e-2) and first["chance", seed] != high
    assert first["high precision", 0] != pytest.approx(first["high precision", 1], abs=1e-4)
    quantized = {r["arm"]: len(r["quantized"]) for r in runs}
    assert quantized == {"high precision": 0, "chance": 0, "low": 4, "late": 4}


def test_a_phase_changes_the_run_from_its_first_step_on(made):
    _, runs = made
    low, late = ([r for r in runs if r["arm"] == name and r["seed"] == 0][0] for name in ("low", "late"))
    assert low["train_loss"][:6] == late["train_loss"][:6]
    assert low["train_loss"][6] != late["train_loss"][6]
    assert "6" in low["held_out"] and low["held_out"]["6"] == late["held_out"]["6"]


def test_finished_runs_are_not_made_again_and_others_are_refused(made, arms):
    out, runs = made
    assert run(out, arms, "--seeds", "2") == runs
    assert len(run(out, arms, "--seeds", "3", "--minutes", "0.00001")) == 8  # no time for another
    assert len(run(out, arms, "--seeds", "3", "--only", "low")) == 10
    with pytest.raises(SystemExit, match="holds runs of another configuration"):
        run(out, arms, "--steps", "9")
    edited = out.parent / "edited.yaml"
    edited.write_text(arms.read_text().replace("name: low, group: g, recipe: fp8-exact", "name: low, group: g, recipe: mxfp8"))
    with pytest.raises(SystemExit, match="holds runs of arm 'low' with another policy; use --out"):
        run(out, edited)


def test_table_figure_and_json(made, arms):
    out, _ = made
    run(out, arms, "--seeds", "2")
    (out / "ablation.png").unlink()
    ablate.main(["--draw", "--device", "cuda", "--out", str(out), "--arms", str(arms), "--seeds", "2"])
    results = json.loads((out / "results.json").read_text())
    assert results["config"]["device"] == "cpu" and results["config"]["steps"] == 8
    by_name = {row["arm"]: row for row in results["rows"]}
    assert list(by_name) == ["chance", "low", "late"]
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    end = {(r["arm"], r["seed"]): r["held_out"]["8"] for r in runs}
    low = by_name["low"]
    assert low["gaps"] == [end["low", s] - end["high precision", s] for s in (0, 1)]
    assert low["mean"] == pytest.approx(sum(low["gaps"]) / 2) and low["sd"] > 0
    assert len(by_name["late"]["before"]) == 2 and low["before"] == []
    text = (out / "table.txt").read_text()
    assert "before the phase" in text and f"{1000 * low['mean']:+.1f}" in text
    assert (out / "ablation.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: [{name: low, recipe: fp8-exact}]", "the first arm is 'high precision'"),
        ("arms: [{name: high precision}, {name: x, recipe: fp8-exakt}]", "fp8-exakt"),
        ("list: []", "no list of arms"),
    ],
)
def test_arms_that_cannot_be_used_are_one_line(tmp_path, text, message):
    (tmp_path / "arms.yaml").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "out", tmp_path / "arms.yaml")
    assert message in str(stopped.value) and "\n" not in str(stopped.value)


def test_jobs_are_processes():
    with ablate.executor(2) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
    with ablate.executor(1) as pool:
        assert pool.submit(os.getpid).result() == os.getpid()
