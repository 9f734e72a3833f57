"""The recipes, each held to what its source says."""

from __future__ import annotations

import pytest
from policy_models import Gpt

from fp4compile.policy import Policy, recipe_text, recipes

MX32 = "fprop(mxfp8:32, mxfp8:32) dgrad(mxfp8:32:sr, fprop>mxfp8:32:sr) wgrad(mxfp8:32:sr, fprop>mxfp8:32:sr)"
MXROW = MX32.replace("32", "row")
LOW = {
    "bf16": "original",
    "fp8-exact": "fprop(nvfp4:row:fp8_exact:half, nvfp4:tensor:fp8_exact:half) dgrad(mxfp8:row:sr, fprop) "
    "wgrad(mxfp8:row:sr:fold, fprop)",
    "fp8-block": "fprop(fp8:128, fp8:tile) dgrad(fp8:128, fprop) wgrad(fp8:128, fprop>fp8:128)",
    "mxfp4": "fprop(mxfp4, mxfp4) dgrad(mxfp4:sr, input>mxfp4) wgrad(mxfp4:sr:had32, input>mxfp4:had32)",
    "mxfp8": MX32,
    "nvidia": "fprop(nvfp4:tensor, nvfp4:tensor:tile) dgrad(nvfp4:tensor:sr, fprop) "
    "wgrad(nvfp4:tensor:sr:had16, input>nvfp4:tensor:had16)",
    "thinking-machines": "fprop(nvfp4:row:four_over_six, nvfp4:tensor) "
    "dgrad(mxfp8:32:sr, fprop>mxfp8:32:sr) wgrad(mxfp8:32:sr, fprop>mxfp8:32:sr)",
}
# (scheme in an MLP chain, scheme elsewhere) in block 0, in the last of 12 blocks, in the head
LAYERS = {
    "bf16": [("original", "original")] * 3,
    "fp8-exact": [("low", "original"), ("mxfp8", "original"), ("low", "original")],
    "thinking-machines": [("low", "original"), ("mxfp8", "original"), ("low", "original")],
    "mxfp8": [("low", "original")] * 3,
    "fp8-block": [("low", "original")] * 3,
    "nvidia": [("low", "low"), ("original", "original"), ("original", "original")],
    "mxfp4": [("low", "low"), ("original", "original"), ("original", "original")],
}


def test_every_recipe_is_in_the_tables() -> None:
    assert set(recipes()) == set(LOW) == set(LAYERS)


@pytest.mark.parametrize("name", recipes())
def test_schemes(name: str) -> None:
    schemes = Policy.recipe(name).schemes
    assert str(schemes["low"]) == LOW[name]
    assert str(schemes["mxfp8"]) == (MXROW if name == "fp8-exact" else MX32)
    assert schemes["original"].original and schemes["bf16"].original


@pytest.mark.parametrize("name", recipes())
def test_layers(name: str) -> None:
    stamps = Policy.recipe(name).resolve(Gpt(12))
    got = [stamps[layer] for layer in ("h.0.mlp.up", "h.11.mlp.up", "lm_head")]
    assert [(s.chain.scheme_name, s.plain.scheme_name) for s in got] == LAYERS[name]
    assert stamps.warnings == []


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_explains_itself(name: str) -> None:
    assert recipe_text(name).startswith("# ")
