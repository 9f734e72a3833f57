"""Arms of a benchmark: ways to train the same model, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Arm = Callable[[nn.Module], Any]
ATTENTION = [
    {"match": "*.attn.*", "scheme": "low"},
    {"chain": "mlp", "scheme": "low"},
]


def bf16(model: nn.Module) -> Any:
    """BF16, compiled by Inductor."""
    return torch.compile(model)


def fp4(recipe: str, layers: list[dict] | None = None) -> Arm:
    """This package with a recipe; ``layers``: rules before the recipe's own."""
    rules = layers or [{"chain": "mlp", "scheme": "low"}]
    policy = {"version": 1, "recipe": recipe, "layers": rules}
    return lambda model: torch.compile(model, backend="fp4", options={"policy": policy})


def torchao(recipe: str) -> Arm:
    """torchao's float8 training, compiled by Inductor."""

    def build(model: nn.Module) -> Any:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        wanted = lambda module, name: "mlp" in name or name in ("0", "2")  # noqa: E731
        return torch.compile(convert_to_float8_training(model, config=config, module_filter_fn=wanted))

    return build


def mlp_arms() -> dict[str, Arm]:
    """BF16 first: the others are compared with it."""
    arms: dict[str, Arm] = {
        "bf16": bf16,
        "fp8-exact": fp4("fp8-exact"),
        "thinking-machines": fp4("thinking-machines"),
    }
    if importlib.util.find_spec("torchao"):
        arms["torchao tensorwise"] = torchao("tensorwise")
    return arms


def gpt_arms() -> dict[str, Arm]:
    """As `mlp_arms`, with the attention projections as well."""
    arms = mlp_arms()
    arms["fp8-exact, attention too"] = fp4("fp8-exact", ATTENTION)
    return arms
