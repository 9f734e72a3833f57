"""Arms of a benchmark: ways to train the same model, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..policy import Policy

Arm = Callable[[nn.Module], Any]
MLP_ONLY = [{"chain": "mlp", "scheme": "low"}]
ATTENTION = [{"match": "*.attn.*", "scheme": "low"}]


def bf16(model: nn.Module) -> Any:
    """BF16, compiled by Inductor."""
    return torch.compile(model)


def fp4(recipe: str, layers: list[dict[str, str]], **keys: Any) -> Arm:
    """This package with a recipe; ``layers``: rules before the recipe's own; more of a policy."""
    policy = Policy.from_dict({"version": 1, "recipe": recipe, "layers": layers, **keys})

    def build(model: nn.Module) -> Any:
        options: dict[str, Any] = {"policy": policy}
        return torch.compile(model, backend="fp4", options=options)

    return build


def torchao(recipe: str, wanted: Callable[[str], bool] | None = None) -> Arm:
    """torchao's float8 training, compiled by Inductor, of the layers whose name is ``wanted``."""
    chosen = wanted or (lambda name: "mlp" in name or name in ("0", "2"))

    def build(model: nn.Module) -> Any:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        converted = convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, name: chosen(name)
        )
        return torch.compile(converted)

    return build


def mlp_arms() -> dict[str, Arm]:
    """BF16 first: the others are compared with it."""
    arms: dict[str, Arm] = {
        "bf16": bf16,
        "fp8-exact": fp4("fp8-exact", MLP_ONLY),
        "fp8-block": fp4("fp8-block", MLP_ONLY),
        "thinking-machines": fp4("thinking-machines", MLP_ONLY),
        "nvidia": fp4("nvidia", MLP_ONLY),
        "mxfp4": fp4("mxfp4", MLP_ONLY),
    }
    return {**arms, **_torchao_arms()}


def _torchao_arms() -> dict[str, Arm]:
    found = importlib.util.find_spec("torchao")
    return {"torchao tensorwise": torchao("tensorwise")} if found else {}


def gpt_arms() -> dict[str, Arm]:
    """BF16 first; recipes with their own rules, with smaller pre-activations, attention too."""
    return {
        "bf16": bf16,
        "fp8-exact": fp4("fp8-exact", []),
        "fp8-exact + MXFP8 pre-activation": fp4("fp8-exact", [], save_preactivation="mxfp8"),
        "fp8-exact + attention": fp4("fp8-exact", ATTENTION),
        "thinking-machines": fp4("thinking-machines", []),
        **_torchao_arms(),
    }
