"""A policy by its file's path or a recipe's name; graphs that are older than their file."""

from __future__ import annotations

import pytest
import torch
from backend_models import Mlp, batch, compiled, precision_warnings

import fp4compile as fp4
from fp4compile import policy_files
from fp4compile.backend import as_policy

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A policy file in the current directory; graphs look at it at every call."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policy_files, "SECONDS", 0.0)
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\ndefault: low\n")
    return path


def stale(texts):
    return [text for text in texts if "has changed" in text]


# The name of a recipe -----------------------------------------------------------------------------


def test_a_recipes_name_is_a_policy(file):
    assert as_policy("mxfp8") == fp4.Policy.recipe("mxfp8")
    net = Mlp()
    compiled(net, "mxfp8")(X)
    assert fp4.explain(net)["up"].scheme.startswith("fprop(mxfp8")
    assert fp4.apply(Mlp(), "nvidia") == fp4.apply(Mlp(), fp4.Policy.recipe("nvidia"))


def test_a_file_of_that_name_wins_and_a_directory_does_not(file):
    (file.parent / "nvidia").mkdir()
    assert as_policy("nvidia") == fp4.Policy.recipe("nvidia")
    file.rename("mxfp8")
    assert as_policy("mxfp8").recipe_name == "fp8-exact"


@pytest.mark.parametrize(
    "name, near", [("mxpf8", "mxfp8"), ("mxfp8.yaml", "mxfp8"), ("nowhere.yaml", None)]
)
def test_a_misspelt_name_is_one_line_with_the_nearest_recipe(file, name, near):
    with pytest.raises(fp4.PolicyError) as caught:
        compiled(Mlp(), name)(X)
    end = f"; did you mean the recipe {near!r}?" if near else ""
    assert str(caught.value) == f"{name}: no such file{end}"


# A file that changes in a running process ---------------------------------------------------------


def test_a_graph_says_once_that_its_file_has_changed(file):
    call = compiled(Mlp(), "p.yaml")
    with precision_warnings() as texts:
        call(X)
        file.write_text("# a comment\nversion: 1\ndefault: low\n")
        call(X)
    assert not stale(texts), "it decides alike"
    with precision_warnings() as texts:
        file.write_text("version: 1\nrecipe: mxfp8\n")
        for _ in range(3):
            call(X)
    assert len(stale(texts)) == 1 and str(file) in texts[0] and "_dynamo.reset()" in texts[0]


def test_an_edited_file_is_noticed_by_a_second_model_that_meets_the_old_graph(file):
    compiled(Mlp(), "p.yaml")(X)
    file.write_text("version: 1\nrecipe: mxfp8\n")
    with precision_warnings() as texts:
        compiled(Mlp(), "p.yaml")(X)
    assert len(stale(texts)) == 1


def test_a_recompilation_that_follows_the_new_text_says_so(file):
    call = compiled(Mlp(), "p.yaml", dynamic=False)
    call(X)
    file.write_text("version: 1\nrecipe: mxfp8\n")
    with precision_warnings() as texts:
        call(batch(2, 8, 32))
        call(X)
    assert len(stale(texts)) == 1


def test_after_a_reset_the_new_text_holds_without_a_warning(file):
    net = Mlp()
    call = compiled(net, "p.yaml")
    call(X)
    file.write_text("version: 1\nrecipe: mxfp8\n")
    torch._dynamo.reset()
    with precision_warnings() as texts:
        call(X)
        call(X)
    assert not stale(texts) and fp4.explain(net)["up"].scheme.startswith("fprop(mxfp8")


@pytest.mark.parametrize("change", ["broken", "removed"])
def test_a_file_that_can_no_longer_be_read(file, change):
    call = compiled(Mlp(), "p.yaml")
    call(X)
    file.write_text("versio") if change == "broken" else file.unlink()
    with precision_warnings() as texts:
        call(X)
    assert len(stale(texts)) == (change == "broken"), "a removed file decides nothing new"


def test_the_file_is_read_once_a_second_at_most(file, monkeypatch):
    monkeypatch.setattr(policy_files, "SECONDS", 1.0)
    clock = [100.0]
    monkeypatch.setattr(policy_files.time, "monotonic", lambda: clock[0])
    call = compiled(Mlp(), "p.yaml")
    call(X)
    reads = []
    monkeypatch.setattr(policy_files, "read_text", lambda p: reads.append(p) or file.read_text())
    for now in (100.0, 100.9, 101.1, 101.2, 102.2):
        clock[0] = now
        call(X)
    assert len(reads) == 2
