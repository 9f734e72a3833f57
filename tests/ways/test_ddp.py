"""DDP by two ranks on the CPU: its optimizer cuts the graph into buckets, here inside block 2."""

from __future__ import annotations

import pytest
from ranks import launch

WHOLE = ["outside", "inside, stamped"]
LAYERS = ["attn", "mlp.up", "mlp.down"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("ddp_ranks.py", tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("way", WHOLE)
def test_layers_keep_their_names_and_schemes(ranks, way):
    of_block = ["left", "low", "low", "low", "low", "mxfp8"]
    wanted = {f"blocks.{i}.{n}": s for i, s in enumerate(of_block) for n in LAYERS}
    for found in ranks:
        assert found[way]["schemes"] == {**wanted, "head": "low"}
        assert found[way]["warnings"] == []


@pytest.mark.parametrize("way", WHOLE)
def test_chains_fuse_within_a_bucket_and_a_cut_one_says_so(ranks, way):
    for found in ranks:
        assert found[way]["chains"] == [1, 3]
        rows = found[way]["rows"]
        cut = [name for name, (reason, _) in rows.items() if "bucket" in reason]
        assert cut == ["blocks.2.mlp.up", "blocks.2.mlp.down"]
        numbers = {i: {rows[f"blocks.{i}.{n}"][1] for n in LAYERS[1:]} for i in (1, 3, 4, 5)}
        assert all(len(n) == 1 and None not in n for n in numbers.values())
        assert len(set.union(*numbers.values())) == 4


def test_a_cut_chain_is_a_chain_for_the_policy(ranks):
    """The default policy names chains only: layers of a cut one keep their precision."""
    for found in ranks:
        mlps = {n: s for n, s in found["default policy"]["schemes"].items() if "mlp" in n}
        assert mlps == {n: "mxfp8" if "blocks.5" in n else "low" for n in mlps} and len(mlps) == 12
        assert found["default policy"]["chains"] == [2, 3]


@pytest.mark.parametrize("way", [*WHOLE, "by block", "default policy"])
def test_gradients_are_the_mean_of_the_ranks(ranks, way):
    """Bit for bit where the draws are the same; behind a cut chain within the rounding noise."""
    for found in ranks:
        assert found[way]["forward"]
        gap, noise = found[way]["gap"], found[way]["noise"]
        exact = [f"blocks.{i}." for i in range(0 if way == "by block" else 3, 6)]
        for name, value in gap.items():
            behind = not name.startswith((*exact, "head"))
            assert value <= (1.5 * noise[name] if behind else 0), (name, value, noise[name])


def test_blocks_compiled_by_themselves_are_silent(ranks):
    """One is wholly original, and the policy has a rule about blocks: neither is an alarm."""
    for found in ranks:
        (text,) = found["by block"]["warnings"]
        assert "'head' ran outside every compiled graph" in text
