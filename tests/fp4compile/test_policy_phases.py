"""What a phase makes of a scheme: backward operands without forward codes, whole schemes, order."""

from __future__ import annotations

import pytest
from fp4compile.kernels.errors import PolicyError
from policy_models import Gpt

from fp4compile.policy import Policy, recipes
from fp4compile.stamp import Stamp

V = "version: 1\n"


def stamp(
    phases: str, step: int | None, recipe: str = "fp8-exact", layer: str = "h.0.mlp.up"
) -> Stamp:
    return Policy.parse(f"{V}recipe: {recipe}\nphases:\n{phases}", "p.yaml").resolve(Gpt(12), step)[
        layer
    ]


def low(phase: str, recipe: str = "fp8-exact") -> str:
    return str(stamp(f"  - {{from_step: 10, {phase}}}\n", 10, recipe).chain.scheme)


FORWARD_ORIGINAL = {
    "fp8-exact": "fprop(original) dgrad(mxfp8:row:sr, input>nvfp4:tensor:fp8_exact:half) "
    "wgrad(mxfp8:row:sr, input>nvfp4:tensor:fp8_exact:half)",
    "thinking-machines": "fprop(original) dgrad(mxfp8:32:sr, input>mxfp8:32) wgrad(mxfp8:32:sr, input>mxfp8:32)",
    "mxfp8": "fprop(original) dgrad(mxfp8:32:sr, input>mxfp8:32) wgrad(mxfp8:32:sr, input>mxfp8:32)",
    "nvidia": "fprop(original) dgrad(nvfp4:tensor:sr, input>nvfp4:tensor:tile) "
    "wgrad(nvfp4:tensor:sr:had16, input>nvfp4:tensor:had16)",
    "mxfp4": "fprop(original) dgrad(mxfp4:sr, input>mxfp4) wgrad(mxfp4:sr:had32, input>mxfp4:had32)",
    "fp8-block": "fprop(original) dgrad(fp8:128, input>fp8:tile) wgrad(fp8:128, input>fp8:128)",
    "bf16": "original",
}


@pytest.mark.parametrize("recipe", recipes())
def test_forward_original_quantizes_backward_operands_from_the_input(recipe: str) -> None:
    assert low("fprop: original", recipe) == FORWARD_ORIGINAL[recipe]


EIGHT_FORWARD = {  # what reads the codes as they were is quantized from the input
    "fp8-exact": "fprop(mxfp8:row, mxfp8:row) dgrad(mxfp8:row:sr, input>nvfp4:tensor:fp8_exact:half) "
    "wgrad(mxfp8:row:sr, input>nvfp4:tensor:fp8_exact:half)",
    "thinking-machines": "fprop(mxfp8:32, mxfp8:32) dgrad(mxfp8:32:sr, fprop>mxfp8:32:sr) "
    "wgrad(mxfp8:32:sr, fprop>mxfp8:32:sr)",
    "nvidia": "fprop(mxfp8:32, mxfp8:32) dgrad(nvfp4:tensor:sr, input>nvfp4:tensor:tile) "
    "wgrad(nvfp4:tensor:sr:had16, input>nvfp4:tensor:had16)",
    "mxfp4": "fprop(mxfp8:32, mxfp8:32) dgrad(mxfp4:sr, input>mxfp4) wgrad(mxfp4:sr:had32, input>mxfp4:had32)",
}


@pytest.mark.parametrize("recipe", EIGHT_FORWARD)
def test_forward_alone_in_another_format(recipe: str) -> None:
    assert low("fprop: mxfp8", recipe) == EIGHT_FORWARD[recipe]


@pytest.mark.parametrize("recipe", EIGHT_FORWARD)
def test_backward_alone_and_both_in_another_format(recipe: str) -> None:
    row = "row" if recipe == "fp8-exact" else "32"
    eight = f"dgrad(mxfp8:{row}:sr, fprop>mxfp8:{row}:sr) wgrad(mxfp8:{row}:sr, fprop>mxfp8:{row}:sr)"
    start = low("dgrad: original, wgrad: original", recipe).partition(" dgrad")[0]
    assert low("dgrad: mxfp8, wgrad: mxfp8", recipe) == f"{start} {eight}"
    both = low("fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8", recipe)
    assert both == low("scheme: mxfp8", recipe) == f"fprop(mxfp8:{row}, mxfp8:{row}) {eight}"


def test_backward_original() -> None:
    assert low("dgrad: original, wgrad: original") == (
        "fprop(nvfp4:row:fp8_exact:half, nvfp4:tensor:fp8_exact:half) dgrad(original) wgrad(original)"
    )


def test_a_gemm_of_another_scheme() -> None:
    assert low("dgrad: mxfp8", "thinking-machines") == low(
        ["from_step: 10", "wgrad: low"][1], "thinking-machines"
    )
    assert low("fprop: original, wgrad: mxfp8", "nvidia") == (
        "fprop(original) dgrad(nvfp4:tensor:sr, input>nvfp4:tensor:tile) wgrad(mxfp8:32:sr, input>mxfp8:32)"
    )


@pytest.mark.parametrize(
    "phase",
    [
        "all: original",
        "scheme: original",
        "all: bf16",
        "fprop: original, dgrad: bf16, wgrad: original",
    ],
)
def test_everything_original(phase: str) -> None:
    got = stamp(f"  - {{from_step: 10, {phase}}}\n", 10)
    assert got.original and got.chain.scheme_name == "original"


def test_a_whole_scheme() -> None:
    got = stamp("  - {from_step: 10, scheme: mxfp8}\n", 99).chain
    assert got.scheme_name == "mxfp8"
    assert got.rule == "recipe fp8-exact: chain mlp; from step 10 (p.yaml:4) scheme mxfp8"


def test_original_layers_stay_original() -> None:
    assert stamp("  - {from_step: 10, scheme: mxfp8}\n", 10).plain.scheme.original
    assert stamp("  - {from_step: 10, scheme: mxfp8}\n", 10, "nvidia", "lm_head").original


def test_the_last_phase_begun_holds() -> None:
    phases = "  - {from_step: 10, fprop: original}\n  - {from_step: 20, all: original}\n"
    names = [stamp(phases, step).chain.scheme_name for step in (None, 0, 9, 10, 19, 20, 10**9)]
    assert names == ["low"] * 3 + ["low, fprop original"] * 2 + ["original"] * 2


def test_no_step_is_the_first_step() -> None:
    assert stamp("  - {from_step: 0, all: original}\n", None).original


def test_shares_of_training() -> None:
    policy = Policy.from_dict(
        {
            "version": 1,
            "recipe": "fp8-exact",
            "phases": [
                {"from_step": "50%", "fprop": "original"},
                {"from_step": "82.5%", "all": "original"},
            ],
        }
    )
    model = Gpt(12)
    first = policy.resolve(model)["h.0.mlp.up"]
    with pytest.raises(PolicyError, match=r"from_step: 50%: say of how many steps: .*for_steps"):
        policy.resolve(model, 3)
    run = policy.for_steps(1000)
    at = {step: str(run.resolve(model, step)["h.0.mlp.up"].chain.scheme) for step in (0, 499, 500, 824, 825)}
    assert at[0] == at[499] == str(first.chain.scheme)
    assert at[500] == at[824] == FORWARD_ORIGINAL["fp8-exact"]
    assert at[825] == "original"
    assert str(run) != str(policy.for_steps(2000))
    for wrong in (0, 2.5, True):
        with pytest.raises(PolicyError, match="for_steps: a whole number of steps"):
            policy.for_steps(wrong)


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        (("120%",), "p.yaml:4.*120% is more than 100%"),
        (("10%", 50), "p.yaml:5.*cannot be mixed"),
        (("60%", "50%"), "p.yaml:5.*50% does not come after 60%"),
        (("late",), "p.yaml:4.*a step from 0 on, or a share of training such as 82%.*not 'late'"),
        ((-1,), "p.yaml:4.*a step from 0 on"),
    ],
)
def test_starts_that_cannot_be_used(starts, text) -> None:
    phases = "".join(f"  - {{from_step: {s}, fprop: original}}\n" for s in starts)
    with pytest.raises(PolicyError, match=text):
        Policy.parse(f"{V}recipe: fp8-exact\nphases:\n{phases}", "p.yaml")
