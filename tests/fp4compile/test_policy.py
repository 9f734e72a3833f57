"""From YAML to stamps: selectors, precedence, blocks, tied modules, strictness, round trips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from fp4compile.kernels.errors import PolicyError
from fp4compile.kernels.formats import Scheme
from policy_models import Block, Conv1D, Gpt, Mlp
from torch import nn

from fp4compile.policy import DEFAULT_RECIPE, Policy, recipes
from fp4compile.policy_rules import Span
from fp4compile.stamp import Decision, Stamp

V = "version: 1\n"
LOW = "fprop(nvfp4:row:fp8_exact:half, nvfp4:tensor:fp8_exact:half) dgrad(mxfp8:row:sr, fprop) wgrad(mxfp8:row:sr:fold, fprop)"
MXFP8 = "fprop(mxfp8:row, mxfp8:row) dgrad(mxfp8:row:sr, fprop>mxfp8:row:sr) wgrad(mxfp8:row:sr, fprop>mxfp8:row:sr)"


def names(policy: Policy, model: nn.Module, chain: bool = False) -> dict[str, str]:
    """Layer -> the name of its scheme."""
    return {k: s.decision(chain).scheme_name for k, s in policy.resolve(model).items()}


def rules(*lines: str, recipe: str = "bf16", more: str = "") -> Policy:
    text = f"{V}recipe: {recipe}\n{more}layers:\n" + "".join(f"  - {line}\n" for line in lines)
    return Policy.parse(text, "policy.yaml")


def chosen(policy: Policy, model: nn.Module) -> set[str]:
    return {name for name, scheme in names(policy, model).items() if scheme != "original"}


# default policy


def test_default_policy_is_fp8_exact_on_chains_with_the_last_blocks_in_mxfp8() -> None:
    stamps = Policy.default().resolve(Gpt(12))
    assert DEFAULT_RECIPE == "fp8-exact" and stamps.warnings == []
    assert str(stamps["h.9.mlp.up"]) == f"chain: {LOW} | original"
    assert str(stamps["h.10.mlp.up"]) == f"chain: {MXFP8} | original"
    assert stamps["h.9.mlp.up"].chain == Decision(
        Scheme.parse(LOW), "low", "recipe fp8-exact: chain mlp"
    )
    assert stamps["h.9.mlp.up"].plain.rule == "recipe fp8-exact: default"
    assert len(stamps) == 4 * 12 + 1 and len({str(s) for s in stamps.values()}) == 2


def test_no_blocks_is_a_warning_for_the_recipes_rule_and_an_error_for_the_users() -> None:
    resolved = Policy.default().resolve(Mlp())
    assert len(resolved.warnings) == 1
    assert (
        "rule `blocks: last 16.6%` (recipe fp8-exact): no repeated blocks in Mlp"
        in resolved.warnings[0]
    )
    assert resolved["up"].chain.scheme_name == "low"
    with pytest.raises(PolicyError) as raised:
        rules("{blocks: last 1, scheme: mxfp8}").resolve(Block())
    assert str(raised.value) == (
        "rule `blocks: last 1` (policy.yaml:4): no repeated blocks in Block; when compiling block by "
        "block, call fp4.apply(model, policy) on the whole model first"
    )


# selectors


@pytest.mark.parametrize(
    ("selector", "layers"),
    [
        ("match: lm_head", {"lm_head"}),
        ("match: '*.qkv'", {"h.0.attn.qkv", "h.1.attn.qkv"}),
        ("match: 'h.0*up'", {"h.0.mlp.up"}),
        ("match: 'h.[1-9].mlp.*'", {"h.1.mlp.up", "h.1.mlp.down"}),
        ("match: 'h.?.mlp.up'", {"h.0.mlp.up", "h.1.mlp.up"}),
        ("match: mlp.up", set()),
        ("match: 'H.0.mlp.up'", set()),
        (
            "match: 're:.*\\.attn\\.(qkv|proj)$'",
            {f"h.{i}.attn.{p}" for i in (0, 1) for p in ("qkv", "proj")},
        ),
        ("match: 're:h\\.1'", set()),
        ("match: 're:h\\.1\\..*up'", {"h.1.mlp.up"}),
        ("match: '*mlp*', blocks: last 1", {"h.1.mlp.up", "h.1.mlp.down"}),
        (
            "blocks: first 50%",
            {f"h.0.{p}" for p in ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")},
        ),
        ("match: lm_head, blocks: first 2", set()),
    ],
)
def test_selectors(selector: str, layers: set[str]) -> None:
    policy = rules(f"{{{selector}, scheme: mxfp8}}")
    assert chosen(policy, Gpt(2)) == layers
    assert bool(policy.resolve(Gpt(2)).warnings) == (not layers)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        # of 1, 2, 3, 4, 5, 6, 12, 24, 32, 62 blocks
        ("last 16.6%", (0, 0, 0, 1, 1, 1, 2, 4, 5, 10)),
        ("first 10%", (0, 0, 0, 0, 1, 1, 1, 2, 3, 6)),
        ("last 15%", (0, 0, 0, 1, 1, 1, 2, 4, 5, 9)),
        ("last 50%", (1, 1, 2, 2, 3, 3, 6, 12, 16, 31)),
        ("first 100%", (1, 2, 3, 4, 5, 6, 12, 24, 32, 62)),
        ("last 4", (1, 2, 3, 4, 4, 4, 4, 4, 4, 4)),
    ],
)
def test_percentages_round_to_nearest(text: str, sizes: tuple[int, ...]) -> None:
    span = Span.parse(text)
    for count, size in zip((1, 2, 3, 4, 5, 6, 12, 24, 32, 62), sizes):
        held = [i for i in range(count) if span.holds((i, count))]
        first = 0 if span.end == "first" else count - size
        assert held == list(range(first, first + size)), (text, count)


def test_chain_rules_decide_for_chains_only() -> None:
    policy = rules(
        "{chain: mlp, match: '*.up', scheme: mxfp8}",
        "{match: '*.down', scheme: low}",
        recipe="fp8-exact",
    )
    stamps = policy.resolve(Gpt(1))
    up, down, qkv = stamps["h.0.mlp.up"], stamps["h.0.mlp.down"], stamps["h.0.attn.qkv"]
    assert (up.chain.scheme_name, up.plain.scheme_name) == ("mxfp8", "original")
    assert up.chain.rule == 'policy.yaml:4 match "*.up", chain mlp'
    assert (down.chain.scheme_name, down.plain.scheme_name) == ("low", "low")
    assert str(down) == LOW
    assert (qkv.chain.scheme_name, qkv.plain.scheme_name) == ("low", "original")


# precedence


def test_first_match_wins_and_excluded_means_excluded() -> None:
    policy = rules(
        "{match: 'h.0.*', scheme: original}",
        "{match: '*.mlp.*', scheme: mxfp8}",
        "{match: 'h.1.*', scheme: low}",
        recipe="fp8-exact",
    )
    got = names(policy, Gpt(3), chain=True)
    assert {got[f"h.0.{p}"] for p in ("attn.qkv", "mlp.up")} == {"original"}
    assert got["h.1.mlp.up"] == "mxfp8" and got["h.1.attn.qkv"] == "low"
    assert got["h.2.mlp.up"] == "mxfp8" and got["h.2.attn.qkv"] == "low"  # the recipe's chain rule
    assert policy.resolve(Gpt(3))["h.0.mlp.up"].chain.rule == 'policy.yaml:4 match "h.0.*"'


def test_the_files_default_replaces_the_recipes() -> None:
    policy = Policy.parse(V + "default: mxfp8\n", "dir/policy.yaml")
    head = policy.resolve(Gpt(12))["lm_head"]
    assert head.plain == Decision(Scheme.parse(MXFP8), "mxfp8", "policy.yaml:2 default")
    assert head.chain.scheme_name == "low"


def test_bf16_is_original() -> None:
    assert (
        str(rules("{match: '*', scheme: bf16}", recipe="mxfp8").resolve(Gpt(1))["lm_head"])
        == "original"
    )


def test_own_schemes_and_a_redefined_low() -> None:
    scheme = "{fprop: {activation: {format: mxfp8}, weight: {format: mxfp8}}, dgrad: original, wgrad: original}"
    text = f"{V}schemes:\n  mine: &mine {scheme}\n  low: *mine\nlayers:\n  - {{match: lm_head, scheme: mine}}\n"
    stamps = Policy.parse(text).resolve(Gpt(12))
    forward = "fprop(mxfp8:32, mxfp8:32) dgrad(original) wgrad(original)"
    assert str(stamps["lm_head"]) == forward
    assert str(stamps["h.0.mlp.up"]) == f"chain: {forward} | original"


def test_merge_keys() -> None:
    text = (
        f"{V}schemes:\n"
        "  a: &a\n    fprop: {activation: {format: mxfp8}, weight: {format: mxfp8}}\n"
        "    dgrad: original\n    wgrad: original\n"
        "  b:\n    <<: *a\n    fprop: original\n    dgrad: original\n"
    )
    policy = Policy.parse(text)
    assert policy.schemes["b"].original and not policy.schemes["a"].original


# names


def test_tied_modules_get_the_first_rule_that_any_name_matches() -> None:
    model = Gpt(2)
    model.h[1].mlp.up = model.h[0].mlp.up
    policy = rules(
        "{match: 'h.1.*', scheme: mxfp8}", "{match: 'h.0.*', scheme: low}", recipe="fp8-exact"
    )
    stamps = policy.resolve(model)
    assert stamps["h.0.mlp.up"] is stamps["h.1.mlp.up"]
    assert stamps["h.0.mlp.up"].plain.scheme_name == "mxfp8"
    assert stamps["h.0.mlp.down"].plain.scheme_name == "low"
    assert stamps.modules[model.h[0].mlp.up] is stamps["h.1.mlp.up"]


def test_modules_are_complete_where_clean_names_fall_together() -> None:
    model = nn.Module()
    model.up = nn.Linear(8, 8)
    model.module = Mlp()
    stamps = Policy.default().resolve(model)
    assert set(stamps.modules) == {model.up, model.module.up, model.module.down}


def test_hf_conv1d_counts() -> None:
    model = nn.Sequential(Conv1D(8, 8), nn.Conv1d(8, 8, 1))
    assert set(Policy.recipe("mxfp8").resolve(model)) == {"0"}


def test_stamp_for_agrees_with_resolve() -> None:
    policy = Policy.recipe("nvidia")
    for name, stamp in policy.resolve(Gpt(12)).items():
        block = (int(name.split(".")[1]), 12) if name.startswith("h.") else None
        assert policy.stamp_for("_orig_mod." + name, block) == stamp


# rules that hold for nothing


def test_a_rule_that_matches_nothing_warns_with_the_nearest_name() -> None:
    policy = rules("{match: lm_haed, scheme: mxfp8}", "{match: 'x.*', scheme: low}")
    warnings = policy.resolve(Gpt(2)).warnings
    assert (
        warnings[0]
        == "policy.yaml:4 match \"lm_haed\": holds for no layer; did you mean 'lm_head'?"
    )
    assert warnings[1] == 'policy.yaml:5 match "x.*": holds for no layer'


def test_a_rule_that_matches_nothing_is_an_error_when_strict() -> None:
    policy = rules("{match: lm_haed, scheme: mxfp8}", more="strict: true\n")
    with pytest.raises(PolicyError, match=r"policy.yaml:5 match .*did you mean 'lm_head'"):
        policy.resolve(Gpt(2))


class Raw(nn.Module):
    """Matrices that are no linear's: a bare one, attention's, an embedding's; a vector; LoRA's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.gain = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(8))
        self.attn, self.wte = nn.MultiheadAttention(8, 2), nn.Embedding(4, 8)
        self.up = nn.Linear(8, 8)
        self.up.lora = nn.Parameter(torch.empty(2, 8))


@pytest.mark.parametrize("name", ["w1", "attn.in_proj_weight", "wte", "up.lora", "attn.out_proj"])
def test_a_rule_may_name_a_matrix_that_is_no_linears(name: str) -> None:
    resolved = rules(f"{{match: {name}, scheme: low}}", more="strict: true\n").resolve(Raw())
    assert not resolved.warnings and set(resolved) == {"attn.out_proj", "up"}


@pytest.mark.parametrize("name", ["gain", "up.weight", "attn.in_proj_bias", "attn.in_proj_wieght"])
def test_a_rule_may_not_name_a_vector_or_a_linears_weight(name: str) -> None:
    (warning,) = rules(f"{{match: {name}, scheme: low}}").resolve(Raw()).warnings
    assert "holds for no layer" in warning
    assert "did you mean 'attn.in_proj_weight'?" in warning or "wieght" not in name


def test_a_percentage_of_no_blocks_warns() -> None:
    assert (
        "holds for no layer"
        in rules("{blocks: last 10%, scheme: mxfp8}").resolve(Gpt(2)).warnings[0]
    )


# stamps


def test_stamp_texts_parse_back() -> None:
    for recipe in recipes():
        for strict in (False, True):
            policy = Policy.parse(f"{V}recipe: {recipe}\nstrict: {str(strict).lower()}\n")
            for stamp in policy.resolve(Gpt(12)).values():
                text = str(stamp)
                back = Stamp.parse(text)
                assert str(back) == text and back.strict is strict
                assert back.chain.scheme == stamp.chain.scheme
                assert back.plain.scheme == stamp.plain.scheme
                assert back.plain.rule == "stamp"
                assert text.startswith("strict ") is strict


def test_stamp_text_leaves_rule_and_file_out() -> None:
    text = V + "layers:\n  - {match: '*', scheme: mxfp8}\n"
    one = Policy.parse(text, "a.yaml").resolve(Gpt(1))["lm_head"]
    two = Policy.parse("# moved\n" + text, "b.yaml").resolve(Gpt(1))["lm_head"]
    assert one != two and str(one) == str(two)


@pytest.mark.parametrize("factors", ["0.875, 1, 1.5", "0.666666666667, 1.0", "5.0e-1"])
def test_search_factors_survive_the_stamp_text(factors: str) -> None:
    text = (
        f"{V}schemes:\n  mine:\n    fprop:\n      weight: {{format: nvfp4}}\n"
        f"      activation: {{format: nvfp4, scale_search: [{factors}]}}\n"
        "    dgrad: original\n    wgrad: original\ndefault: mine\n"
    )
    stamp = Policy.parse(text).stamp_for("up")
    searched = Stamp.parse(str(stamp)).plain.scheme.fprop[0].format.scale_search
    assert searched == tuple(float(f) for f in factors.split(","))


# saving


def test_save_keeps_every_byte(tmp_path: Path) -> None:
    text = V + "# why\nlayers:\n  - {match: 'é*', scheme: low}\r\n"
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_bytes(text.encode())
    Policy.load(first).save(second)
    assert second.read_bytes() == text.encode()


@pytest.mark.parametrize("recipe", recipes())
def test_recipes_load_save_and_resolve_alike(recipe: str, tmp_path: Path) -> None:
    policy = Policy.recipe(recipe)
    policy.save(tmp_path / "p.yaml")
    again = Policy.load(tmp_path / "p.yaml")
    assert again.resolve(Gpt(12)) == policy.resolve(Gpt(12))
    assert str(again) == str(policy)
    assert {"low", "mxfp8", "original", "bf16"} <= set(policy.schemes)


def test_from_dict() -> None:
    data = {"version": 1, "recipe": "mxfp8", "layers": [{"match": "lm_head", "scheme": "low"}]}
    assert str(Policy.from_dict(data)) == str(Policy.parse(yaml.safe_dump(data)))
    with pytest.raises(PolicyError, match="<dict>:2: .*did you mean 'recipe'"):
        Policy.from_dict({"version": 1, "recpie": "mxfp8"})


def test_save_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no such file"):
        Policy.default().save(tmp_path / "no" / "p.yaml")


def test_text_of_a_policy_follows_what_it_decides() -> None:
    base = V + "layers:\n  - {match: a, scheme: low}\n"
    same = "# comment\n" + base + "strict: false\n"
    assert str(Policy.parse(base, "a")) == str(Policy.parse(same, "b"))
    for other in (base.replace("low", "mxfp8"), base + "strict: true\n", base + "recipe: mxfp8\n",
                  base + "default: low\n", base + "phases: [{from_step: 1, all: original}]\n"):  # fmt: skip
        assert str(Policy.parse(other)) != str(Policy.parse(base))


def test_policies_are_hashable_and_equal_by_content() -> None:
    assert Policy.recipe("mxfp8") == Policy.recipe("mxfp8")
    assert hash(Policy.recipe("mxfp8")) == hash(Policy.recipe("mxfp8"))
