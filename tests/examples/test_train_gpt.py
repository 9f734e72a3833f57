"""The demo: its text, its model, and the whole script on a model of toy size."""

from __future__ import annotations

import io
import json
import math
import struct
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import loss_plot  # noqa: E402
import text_data  # noqa: E402
import train_gpt  # noqa: E402


def test_standard_library_is_sorted_source_without_tests():
    files = text_data.standard_library()
    assert files == text_data.standard_library()
    assert len(files) > 300 and all(f.suffix == ".py" for f in files)
    assert not [f for f in files if {"site-packages", "test", "tests"} & set(f.parts[-3:-1])]
    assert [f.as_posix() for f in files] == sorted(f.as_posix() for f in files)


def test_every_tenth_file_is_held_out_and_none_is_in_both():
    files = text_data.standard_library()
    train, held = text_data.split(files)
    assert not set(train) & set(held)
    assert set(train) | set(held) == set(files)
    assert len(held) == len(files) // 10
    text, held_text = text_data.load(None, context=64)
    assert bytes(held_text[:200].tolist()) == b"".join(f.read_bytes() for f in held)[:200]
    assert len(text) == sum(len(f.read_bytes()) for f in train)


def test_a_file_of_ones_own_is_cut_into_a_start_and_a_held_out_end(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(250)) * 4)
    train, held = text_data.load(str(file), context=20)
    assert len(train) == 900 and len(held) == 100
    assert torch.cat([train, held]).tolist() == list(range(250)) * 4


def test_windows_and_the_bytes_that_follow():
    text = text_data.as_tensor(bytes(range(100)))
    tokens, following = text_data.windows(text, torch.tensor([0, 89]), 10, "cpu")
    assert tokens.tolist() == [list(range(10)), list(range(89, 99))]
    assert torch.equal(following, tokens + 1)


def test_starts_come_from_their_own_generator_and_cover_the_text():
    text = torch.zeros(1000, dtype=torch.uint8)
    draws = []
    for noise in (0, 7):
        torch.manual_seed(noise)
        draws.append(text_data.random_starts(text, 500, 10, torch.Generator().manual_seed(3)))
    assert torch.equal(*draws)
    assert draws[0].min() >= 0 and draws[0].max() + 11 <= 1000
    spread = text_data.spread_starts(text, 5, 10)
    assert spread[0] == 0 and spread[-1] + 11 == 1000 and len(set(spread.diff().tolist())) <= 2


def gpt(seed: int = 0) -> train_gpt.GPT:
    return train_gpt.GPT(2, 32, 16, torch.Generator().manual_seed(seed))


def test_model_is_causal_and_its_logits_have_one_row_a_byte():
    model, tokens = gpt(), torch.randint(256, (3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, 256)
    changed = tokens.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(model(changed)[:, :10], logits[:, :10])
    assert not torch.allclose(model(changed)[:, 10:], logits[:, 10:])


def test_initial_weights_come_from_their_own_generator():
    torch.manual_seed(0)
    one = gpt().state_dict()
    torch.manual_seed(1)
    two = gpt().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(gpt(1).token.weight, one["token.weight"])


def test_learning_rate_rises_stays_and_falls_to_nearly_zero():
    rates = [train_gpt.learning_rate(step, 400, 1.0) for step in range(400)]
    assert rates[0] == 1 / train_gpt.WARMUP and rates[100] == 1.0 == max(rates)
    assert 0 < rates[-1] < 0.01
    # Before it falls it is the same whatever the number of steps: that may still change then.
    assert rates[:200] == [train_gpt.learning_rate(step, 500, 1.0) for step in range(200)]


def test_smoothing_is_a_mean_over_the_last_values():
    assert loss_plot.smooth([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]


@pytest.mark.parametrize(("gap", "within"), [(0.0125, "0.013"), (-0.0071, "0.008"), (0.007, "0.007")])
def test_the_headline_is_a_bound(gap, within):
    rows = [{"arm": "high precision", "train_loss": [2.0], "held_out": {1: 0.0}}]
    rows.append({"arm": "low", "train_loss": [2.0], "held_out": {1: gap}})
    assert loss_plot.headline(rows) == f"After 1 steps every arm is within {within} nats of high precision"


SMALL = "--layers 2 --width 32 --context 32 --batch 4 --steps 3 --sample-bytes 5 --device cpu"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A whole run of two arms on three batches: the rewritten graphs, without Inductor."""
    out = tmp_path_factory.mktemp("demo")
    arms = ["--compiler", "eager", "--arms", "fp8-exact", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        printed = Console(width=80, file=io.StringIO())
        patch.setattr(train_gpt, "console", printed)
        patch.setenv("COLUMNS", "80")
        train_gpt.main([*SMALL.split(), *arms])
    torch._dynamo.reset()
    (out / "printed").write_text(printed.file.getvalue())
    return out, json.loads((out / "results.json").read_text())


def saved_for_backward(module, x) -> int:
    """Bytes that plain PyTorch keeps beside the parameters, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    return sum(t.nbytes for at, t in kept.items() if at not in parameters)


def test_kept_bytes_of_high_precision_are_measured_ones(trained):
    _, results = trained
    mlp, x = train_gpt.MLP(32), torch.randn(4, 32, 32)
    low = results["arms"][1]
    assert low["kept_bytes_original"] == 2 * saved_for_backward(mlp, x)
    assert 0.5 < low["kept_bytes"] / low["kept_bytes_original"] < 0.65


def test_what_is_printed_fits_80_columns_and_names_one_number_of_kept_bytes(trained):
    text, low = (trained[0] / "printed").read_text(), trained[1]["arms"][1]
    assert max(map(len, text.splitlines())) <= 80
    now, before = (f"{low[key] / 1024:.0f}" for key in ("kept_bytes", "kept_bytes_original"))
    plain = " ".join(text.split())
    assert f"these layers keep {now} KiB for backward, {before} KiB in high precision" in plain
    assert f"{low['kept_bytes'] / 2**20:.1f} of {low['kept_bytes_original'] / 2**20:.1f}" in text


def test_arms_start_equal_and_stay_finite(trained):
    _, results = trained
    high, low = results["arms"]
    assert [high["arm"], low["arm"]] == ["high precision", "fp8-exact"]
    assert high["steps"] == low["steps"] == 3 == len(low["train_loss"])
    for arm in (high, low):
        assert all(map(math.isfinite, [*arm["train_loss"], *arm["held_out"].values()]))
    # The first losses are of the same weights on the same batch: what differs is quantization.
    assert low["train_loss"][0] == pytest.approx(high["train_loss"][0], abs=0.05)
    assert low["train_loss"] != high["train_loss"]
    assert low["gap"] == pytest.approx(low["held_out_loss"] - high["held_out_loss"])
    assert high["gap"] == 0 and high["kept_bytes"] == 0
    assert min(low["kept_bytes"], low["kept_bytes_original"]) > 0
    assert all(arm["sample"].startswith("def ") for arm in (high, low))
    assert results["config"]["width"] == 32 and results["config"]["seed"] == 0


def test_the_picture_is_a_png_of_some_size(trained):
    png = (trained[0] / "loss.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width >= 1200 and height >= 900 and len(png) > 20_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/file"], "cannot read no/such/file: No such file or directory"),
        (["--data", "SHORT"], "SHORT has 600 bytes, 650 are needed"),
        (["--arms", "fp8-exakt"], "fp8-exakt"),
        (["--arms", "missing.yaml"], "missing.yaml"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHORT").write_bytes(b"x" * 600)
    with pytest.raises(SystemExit) as stopped:
        train_gpt.main([*arguments, "--context", "64", "--device", "cpu"])
    text = str(stopped.value)
    assert text.startswith("train_gpt: ") and message in text and "\n" not in text
