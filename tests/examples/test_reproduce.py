"""The docs' tables and figures are those of the JSON files; the scripts run, in small, on the CPU."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "reproduce"), str(ROOT / "examples")]

import figures  # noqa: E402
import formats  # noqa: E402
import rounding  # noqa: E402
import tables  # noqa: E402
import train  # noqa: E402
import transposition  # noqa: E402


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_are_those_of_the_json_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.rewritten(text) == text
    numbers = re.search(r"<!-- table.*?\| (\d+\.\d+)", text, re.DOTALL)
    assert numbers
    wrong = text[: numbers.start(1)] + "9.876" + text[numbers.end(1) :]
    assert tables.rewritten(wrong) == text


def png_text(path: Path) -> dict[str, str]:
    """The texts in a PNG file."""
    data, at, found = path.read_bytes(), 8, {}
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"tEXt":
            key, _, value = data[at + 8 : at + 8 + size].partition(b"\0")
            found[key.decode()] = value.decode()
        at += size + 12
    return found


@pytest.mark.parametrize("name", figures.DRAWN)
def test_figures_are_those_of_the_json_files(name):
    picture = figures.FIGURES / f"{name}.png"
    assert picture.exists() == (figures.RESULTS / f"{figures.DRAWN[name][0]}.json").exists()
    if picture.exists():
        assert png_text(picture)["Source"] == figures.digest(name)


def test_every_figure_of_the_docs_is_drawn_from_results():
    assert {path.stem for path in figures.FIGURES.iterdir()} <= set(figures.DRAWN)


def test_formats_lose_what_the_article_says_on_gaussian_data():
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    wanted = {"NVFP4": 0.095, "MXFP8": 0.027, "BF16": 0.0017}
    for name, value in wanted.items():
        assert formats.common.error(formats.decoded(x, name), x) == pytest.approx(value, rel=0.03)
    assert formats.zeroed(x, formats.decoded(x, "NVFP4 in 16x16 tiles")) == pytest.approx(0.101, abs=0.004)
    found = formats.facts()
    assert found["E2M1 sizes"] == [0, 0.5, 1, 1.5, 2, 3, 4, 6] and found["E4M3 sizes"] == 127
    assert found["block of -54, stored"] == -54 and found["block of -54, MX scale"] == 16


def test_transposed_copies_and_draws():
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    copy = formats.decoded(w, "NVFP4")
    errors = [
        transposition.common.error(transposition.requantized(copy, transposition.TARGETS["NVFP4"], n), copy)
        for n in (0, 1, 16)
    ]
    assert errors[0] == pytest.approx(0.093, abs=0.004) and errors[1] == pytest.approx(0.132, abs=0.008)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)
    assert transposition.exact(w, block="tile") == transposition.exact(w, block_scales="fp8_exact") == 0
    assert rounding.example(512) == pytest.approx(0.25, abs=0.02)


def test_gradients_of_the_fp8_exact_recipe_are_nearer_to_the_exact_ones():
    draw = torch.Generator().manual_seed(2)
    shapes = {"x": (64, 32), "w1": (128, 32), "w2": (32, 128), "g": (64, 32)}
    t = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    errors = {}
    for recipe in rounding.RECIPES:
        stochastic, nearest = rounding.schemes(recipe)
        want = rounding.exact_gradients(stochastic, t)
        got = rounding.gradients(nearest, t, 0)
        errors[recipe] = {name: rounding.common.error(got[name], want[name]) for name in want}
    for name, value in errors["fp8-exact"].items():
        assert 0.01 < value < errors["thinking-machines"][name] < 0.08


def test_training_stops_and_goes_on_with_the_same_numbers(tmp_path, monkeypatch):
    sizes = {"--layers": 1, "--width": 32, "--heads": 2, "--context": 16, "--batch": 2}
    common = ["--device", "cpu", "--seeds", "1", "--steps", "6", "--arms", "bf16 eager"]
    common += [str(a) for pair in sizes.items() for a in pair]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.main([*common, "--runs", str(whole)])
    step, done = train.Run.step, []

    def step_and_count(run, text, number):
        step(run, text, number)
        done.append(number)
        if number == 2:
            monkeypatch.setattr(train.time, "perf_counter", lambda: 1e12)

    monkeypatch.setattr(train.Run, "step", step_and_count)
    train.main([*common, "--runs", str(parts)])
    assert done == [0, 1, 2] and not (parts / "train.json").exists()
    monkeypatch.undo()
    train.main([*common, "--runs", str(parts)])
    rows = [json.loads((folder / "train.json").read_text())["rows"][0] for folder in (whole, parts)]
    assert rows[0]["loss"] == rows[1]["loss"] and rows[0]["held_out"] == rows[1]["held_out"]
    assert rows[0]["sample"] == rows[1]["sample"]
