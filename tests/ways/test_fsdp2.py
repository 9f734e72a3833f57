"""FSDP2 (`fully_shard`) by two ranks on the CPU: same bits as one process that sees both batches."""

from __future__ import annotations

import pytest
from ranks import launch

WAYS = ["compiled after", "compiled before, checkpointed", "wrapped before", "whole"]
BLOCKS = ["left", "low", "low", "mxfp8"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("fsdp2_ranks.py", tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize("way", WAYS)
def test_every_block_has_its_precision(ranks, way):
    """By block, and whole: FSDP's hooks break the root's loop, and the head runs eagerly."""
    for found in ranks:
        layers = found[way]["schemes"]
        assert layers.pop("head") in ("left", "not compiled") and len(layers) == 12
        assert all(scheme == BLOCKS[int(name.split(".")[1])] for name, scheme in layers.items())
        assert found[way]["warnings"] == []


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_mean_of_the_ranks(ranks, way):
    for found in ranks:
        gradients = found[way]["gradients"]
        assert found[way]["forward"] and len(gradients) == 4 * 8 + 2
        assert all(gradients.values()), [n for n, same in gradients.items() if not same]


@pytest.mark.parametrize("way", WAYS)
def test_a_monitor_finds_the_layers_of_gathered_weights(ranks, way):
    """By the weights' sizes, which differ from block to block; each rank writes a file of its own."""
    for found in ranks:
        read = found[way]["read"]
        assert set(read) == {n for n, scheme in found[way]["schemes"].items() if scheme in ("low", "mxfp8")}
        assert all(rms == pytest.approx(wanted, rel=1e-5) for rms, wanted in read.values())
        assert found[way]["unseen"] == [] and found[way]["files"] == ["health.rank0.csv", "health.rank1.csv"]


def test_a_distributed_checkpoint_gives_the_same_next_steps(ranks):
    for found in ranks:
        assert found["checkpoint"]["same"] and found["checkpoint"]["noise matters"]
        assert not any("fp4" in key for key in found["checkpoint"]["keys"])


def test_example_inputs_on_every_rank(ranks):
    for found in ranks:
        mine = {i: s for i, s in enumerate(BLOCKS) if s != "left"}
        wanted = {f"blocks.{i}.{n}": s for i, s in mine.items() for n in ("attn", "mlp.up", "mlp.down")}
        assert found["explained"] == wanted


def test_kept_codes_are_refused(ranks):
    assert all("FSDP" in found["caching"]["error"] for found in ranks)


def test_mixed_precision_quantizes_the_low_precision_copies(ranks):
    for found in ranks:
        assert found["mixed"] == {"forward": True, "gradients": {"torch.float32"}}
