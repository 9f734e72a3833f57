"""Which container holds the blocks, which block a layer is in, and wrapped names."""

from __future__ import annotations

import pytest
import torch
from policy_models import Attention, Block, Conv1D, Gpt, Mlp, Moe
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp4compile.blocks import Blocks, clean_name, find_blocks, is_linear, linears


def found(model: nn.Module) -> tuple[str, int] | None:
    blocks = find_blocks(model)
    return (blocks.container, blocks.count) if blocks else None


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second


def test_the_longest_container_wins_and_the_first_of_equals() -> None:
    assert found(Gpt(12)) == ("h", 12)
    assert found(Pair(Gpt(2), Gpt(3))) == ("second.h", 3)
    assert found(Pair(Gpt(3), Gpt(3))) == ("first.h", 3)


def test_experts_inside_blocks_are_not_blocks() -> None:
    assert found(Moe(n=3, experts=8)) == ("layers", 3)


def test_stages_are_the_blocks_of_a_staged_model() -> None:
    stages = nn.Sequential(*[nn.Sequential(*[Block() for _ in range(3)]) for _ in range(4)])
    assert found(stages) == ("", 4)
    assert Blocks("", ("0", "1")).block_of("1.2.mlp.up") == (1, 2)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(8, 8),
        Mlp(),
        Gpt(1),
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
        nn.ModuleList([Mlp(), Attention()]),
        nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)]),
        nn.Sequential(),
    ],
)
def test_no_repeated_blocks(model: nn.Module) -> None:
    assert find_blocks(model) is None


def test_bare_linears_count_only_without_other_blocks() -> None:
    heads = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
    assert found(Pair(heads, Gpt(2))) == ("second.h", 2)
    assert found(heads) == ("", 5)


def test_module_dict_and_shared_elements() -> None:
    names = nn.ModuleDict({key: Block() for key in ("a", "b", "c")})
    blocks = find_blocks(Pair(names, Mlp()))
    assert blocks and blocks.block_of("first.c.mlp.up") == (2, 3)
    shared = Block()
    assert found(Pair(nn.ModuleList([shared] * 4), Mlp())) == ("first", 4)


def test_block_of() -> None:
    blocks = find_blocks(Gpt(12))
    assert blocks
    assert blocks.block_of("h.10.mlp.up") == (10, 12)
    assert blocks.block_of("_orig_mod.h.10._checkpoint_wrapped_module.mlp.up") == (10, 12)
    assert blocks.block_of("lm_head") is None
    assert blocks.block_of("h.12.mlp.up") is None
    assert blocks.block_of("hh.1.mlp.up") is None


def test_wrapped_blocks_count_as_what_they_wrap() -> None:
    model = Gpt(4)
    model.h[0] = torch.compile(model.h[0], backend="eager")
    model.h[1] = checkpoint_wrapper(model.h[1])
    model.h[2].__class__ = type("FSDPBlock", (type("FSDPModule", (), {}), Block), {})
    assert found(model) == ("h", 4)
    names = [name for several in linears(model).values() for name in several]
    assert names[:2] == ["h.0.attn.qkv", "h.0.attn.proj"] and "h.1.mlp.up" in names
    assert found(torch.compile(model, backend="eager")) == ("h", 4)
    assert found(nn.DataParallel(model)) == ("h", 4)


@pytest.mark.parametrize(
    ("wrapped", "clean"),
    [
        ("module.h.0.up", "h.0.up"),
        ("module.module._orig_mod.up", "up"),
        ("_fsdp_wrapped_module.h.0._fsdp_wrapped_module._checkpoint_wrapped_module.up", "h.0.up"),
        ("up._orig_mod", "up"),
        ("h.module.up", "h.module.up"),
        ("", ""),
    ],
)
def test_clean_name(wrapped: str, clean: str) -> None:
    assert clean_name(wrapped) == clean


def test_what_is_a_linear() -> None:
    assert is_linear(nn.Linear(2, 2)) and is_linear(Conv1D(4, 2))
    assert is_linear(nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2))
    assert not is_linear(nn.Embedding(2, 2)) and not is_linear(nn.Conv1d(1, 1, 1))


def test_tied_modules_have_all_their_names() -> None:
    model = Gpt(2)
    model.h[1].mlp.up = model.h[0].mlp.up
    assert linears(model)[model.h[0].mlp.up] == ["h.0.mlp.up", "h.1.mlp.up"]
