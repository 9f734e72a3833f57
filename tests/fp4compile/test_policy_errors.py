"""Every error of a policy file is one line: file, line, keys, and what is wrong or nearest."""

from __future__ import annotations

from pathlib import Path

import pytest
from fp4compile.kernels.errors import PolicyError

from fp4compile.policy import Policy

V = "version: 1\n"
RULE = V + "layers:\n  - {match: a, scheme: low}\n  - "
SCHEME = V + "schemes:\n  mine:\n"
FPROP = SCHEME + "    fprop:\n      activation: {format: nvfp4}\n      weight: {format: nvfp4}\n"
NO_BACKWARD = "    dgrad: original\n    wgrad: original\n"
PHASE = V + "phases:\n  - "


def operand(text: str, weight: str = "{format: nvfp4}") -> str:
    return f"{SCHEME}    fprop:\n      activation: {text}\n      weight: {weight}\n{NO_BACKWARD}"


def backward(dgrad: str = "original", wgrad: str = "original") -> str:
    return f"{FPROP}    dgrad: {dgrad}\n    wgrad: {wgrad}\n"


# text -> line, words that the message has
ERRORS: dict[str, tuple[str, int, str]] = {
    "empty": ("", 1, "empty"),
    "comments only": ("# nothing\n\n", 1, "empty"),
    "list at the top": ("- a\n- b\n", 1, "a mapping of keys is needed"),
    "text at the top": ("hello", 1, "a mapping of keys is needed"),
    "no version": ("recipe: mxfp8", 1, "'version' is missing (write `version: 1`)"),
    "version 2": ("version: 2", 1, "version 2 is unknown; this release reads version 1"),
    "version true": ("version: true", 1, "version true is unknown"),
    "version 1.0": ("version: 1.0", 1, "version 1.0 is unknown"),
    "version text": ("version: '1'", 1, "version '1' is unknown"),
    "unknown key": (V + "layrs: []", 2, "layrs: unknown key 'layrs'; did you mean 'layers'?"),
    "unknown recipe": (V + "recipe: fp8-exct", 2, "did you mean 'fp8-exact'?"),
    "empty recipe": (V + "recipe: ''", 2, "unknown recipe ''"),
    "duplicate key": (
        V + "default: low\n\ndefault: low",
        4,
        "duplicate key 'default' (first on line 2)",
    ),
    "duplicate key in a rule": (
        RULE + "{match: a, match: b, scheme: low}",
        4,
        "duplicate key 'match'",
    ),
    "strict": (V + "strict: maybe", 2, "strict: true or false is needed, not 'maybe'"),
    "save_weight": (V + "save_weight: cods", 2, "did you mean 'codes'?"),
    "save_weight reserved": (V + "save_weight: remake", 2, "not available"),
    "default": (V + "default: orignal", 2, "unknown scheme 'orignal'; did you mean 'original'?"),
    "layers is a mapping": (V + "layers: {a: b}", 2, "layers: a list is needed"),
    "rule is a text": (RULE + "lm_head", 4, "layers[1]: a mapping is needed, not 'lm_head'"),
    "rule is null": (RULE, 4, "layers[1]: a mapping is needed, not null"),
    "rule's key": (
        RULE + "{match: a, schem: low}",
        4,
        "unknown key 'schem'; did you mean 'scheme'?",
    ),
    "selector": (RULE + "{block: last 2, scheme: low}", 4, "did you mean 'blocks'?"),
    "rule's key, own line": (
        RULE + "match: a\n    scheme: low\n    chian: mlp",
        6,
        "did you mean 'chain'?",
    ),
    "no scheme": (RULE + "{match: a}", 4, "'scheme' is missing"),
    "no selector": (RULE + "{scheme: low}", 4, "no selector"),
    "null selector": (RULE + "{match: null, scheme: low}", 4, "no selector"),
    "rule's scheme": (
        RULE + "{match: a, scheme: lwo}",
        4,
        "unknown scheme 'lwo'; did you mean 'low'?",
    ),
    "match a number": (RULE + "{match: 3, scheme: low}", 4, "a text is needed, not 3 (quote it)"),
    "bad regex": (RULE + "{match: 're:a(', scheme: low}", 4, "bad regex 're:a('"),
    "chain": (RULE + "{chain: mpl, scheme: low}", 4, "did you mean 'mlp'?"),
    "120%": (
        RULE + "{blocks: last 120%, scheme: low}",
        4,
        "'last 120%': needs more than 0% and at most 100%",
    ),
    "0%": (RULE + "{blocks: first 0%, scheme: low}", 4, "needs more than 0%"),
    "0 blocks": (RULE + "{blocks: last 0, scheme: low}", 4, "needs 1 or more blocks"),
    "half a block": (RULE + "{blocks: last 2.5, scheme: low}", 4, "write % for a percentage"),
    "lst": (RULE + "{blocks: lst 2, scheme: low}", 4, "did you mean 'last'?"),
    "negative blocks": (RULE + "{blocks: last -2, scheme: low}", 4, "is none of"),
    "blocks a number": (RULE + "{blocks: 2, scheme: low}", 4, "a text is needed, not 2"),
    "schemes is a list": (V + "schemes: [a]", 2, "schemes: a mapping is needed"),
    "built in": (
        SCHEME.replace("mine", "bf16") + "    fprop: original\n" + NO_BACKWARD,
        3,
        "built in",
    ),
    "GEMM missing": (SCHEME + "    fprop: original\n    dgrad: original", 3, "'wgrad' is missing"),
    "GEMM's word": (SCHEME + "    fprop: orginal\n" + NO_BACKWARD, 4, "did you mean 'original'?"),
    "GEMM's key": (SCHEME + "    fprob: original\n" + NO_BACKWARD, 4, "did you mean 'fprop'?"),
    "GEMM's operand": (
        operand("{format: nvfp4}").replace("weight", "weigth"),
        6,
        "did you mean 'weight'?",
    ),
    "operand missing": (
        FPROP.replace("      weight: {format: nvfp4}\n", "") + NO_BACKWARD,
        4,
        "'weight' is missing",
    ),
    "format": (
        operand("{format: nvfp5}"),
        5,
        "'nvfp5' is none of nvfp4, mxfp8, mxfp4, s2f6, fp8; did you mean 'nvfp4'?",
    ),
    "format missing": (operand("{outer: row}"), 5, "outer without a format"),
    "operand empty": (operand("{}"), 5, "'format' is missing"),
    "operand's key": (operand("{format: nvfp4, roundng: nearest}"), 5, "did you mean 'rounding'?"),
    "block": (operand("{format: nvfp4, block: tiles}"), 5, "did you mean 'tile'?"),
    "outer of mxfp8": (operand("{format: mxfp8, outer: row}"), 5, "mxfp8 has no outer"),
    "block of nvfp4": (
        operand("{format: nvfp4, block: 128}"),
        5,
        "block=128 is none of 1x16, tile",
    ),
    "rotation": (operand("{format: nvfp4, rotation: 15}"), 5, "15 is none of 16, 32"),
    "rotation of one": (operand("{format: nvfp4, rotation: 16}"), 4, "rotation must be the same"),
    "search word": (
        operand("{format: nvfp4, scale_search: four_over_sx}"),
        5,
        "did you mean 'four_over_six'?",
    ),
    "search half": (
        operand("{format: nvfp4, block_scales: fp8_exact, scale_search: hlaf}"),
        5,
        "did you mean 'half'?",
    ),
    "search half, plain": (operand("{format: nvfp4, scale_search: half}"), 5, "fp8_exact"),
    "search of fp8_exact": (
        operand("{format: nvfp4, block_scales: fp8_exact, scale_search: four_over_six}"),
        5,
        "no other search",
    ),
    "search far off": (operand("{format: nvfp4, scale_search: [1, 448]}"), 5, "factor 448 is outside 0.5 to 2"),
    "search list": (operand("{format: nvfp4, scale_search: [1, -1]}"), 5, "positive factors"),
    "search nan": (
        operand("{format: nvfp4, scale_search: [.nan]}"),
        5,
        "positive factors",
    ),
    "search texts": (operand("{format: nvfp4, scale_search: [a]}"), 5, "nor a list of factors"),
    "search, stochastic": (
        operand("{format: nvfp4, scale_search: four_over_six, rounding: stochastic}"),
        5,
        "cannot be combined with stochastic",
    ),
    "tiles on activations": (operand("{format: nvfp4, block: tile}"), 5, "tiles are for weights"),
    "stochastic forward": (operand("{format: mxfp8, rounding: stochastic}"), 4, "no stochastic"),
    "reuse": (backward("{gradient: {format: mxfp8}, weight: {from: fprop}}"), 7, "add a format"),
    "own weight": (
        backward("{gradient: {format: mxfp8}, weight: {format: mxfp8}}"),
        7,
        "say where it comes from",
    ),
    "fold": (
        backward(
            wgrad="{gradient: {format: mxfp8, fold: outer}, activation: {from: fprop, format: mxfp8}}"
        ),
        8,
        "fold needs the activation",
    ),
    "from": (
        backward("{gradient: {format: mxfp8}, weight: {from: fpop}}"),
        7,
        "did you mean 'fprop'?",
    ),
    "phase says nothing": (PHASE + "{from_step: 5}", 3, "says no change"),
    "phase without step": (PHASE + "{fprop: original}", 3, "'from_step' is missing"),
    "phase before 0": (PHASE + "{from_step: -5, all: original}", 3, "a step from 0 on, or a share of training such as 82%, is needed, not -5"),
    "phase at 1.5": (
        PHASE + "{from_step: 1.5, all: original}",
        3,
        "a step from 0 on, or a share of training such as 82%, is needed, not 1.5",
    ),
    "phase order": (
        PHASE + "{from_step: 5, all: original}\n  - {from_step: 5, all: original}",
        4,
        "5 does not come after 5",
    ),
    "phase's scheme": (PHASE + "{from_step: 5, fprop: orginal}", 3, "did you mean 'original'?"),
    "phase's key": (PHASE + "{from_step: 5, fpop: original}", 3, "did you mean 'fprop'?"),
    "phase twice": (PHASE + "{from_step: 5, fprop: original, all: low}", 3, "stands alone"),
    "phase, illegal": (
        V + "recipe: thinking-machines\nschemes:\n  mine: {fprop: {activation: {format: nvfp4},"
        " weight: {format: nvfp4, block: tile}}, dgrad: {gradient: {format: mxfp8},"
        " weight: {from: fprop}}, wgrad: original}\nphases:\n  - {from_step: 5, dgrad: mine}",
        6,
        "scheme mxfp8: dgrad.weight: from: fprop needs",
    ),
    # YAML itself
    "tab": (V + "layers:\n\t- {match: a, scheme: low}", 3, "a tab"),
    "tab in front of a value": (V + "recipe:\t\tx\n\ty: 1", 2, "a tab"),
    "python tag": ("version: 1\na: !!python/object/apply:os.system [ls]", 2, "not allowed"),
    "unknown tag": ("version: !one 1", 1, "!one '1' is not allowed"),
    "date": (V + "default: 2020-01-01", 2, "!!timestamp '2020-01-01' is not allowed"),
    "broken tag": (V + "default: !!int abc", 2, "'abc' is no !!int"),
    "huge number": ("version: " + "9" * 5000, 1, "is no !!int"),
    "key is a number": (V + "1: 2", 2, "key 1 must be a text"),
    "key is a list": (V + "? [a]\n: b", 2, "a key must be a text"),
    "two documents": (V + "---\n" + V, 2, "one document"),
    "open bracket": (V + "layers: [", 2, "not YAML"),
    "open quote": (V + 'recipe: "x', 2, "not YAML"),
    "unknown alias": (V + "recipe: *x", 2, "undefined alias 'x'"),
    "control character": (V + "recipe: \x07", 2, "U+0007"),
    "merge of a number": (V + "<<: 3", 2, "a merge key"),
    "anchor in itself": (V + "layers: &a [*a]", 2, "an anchor that contains itself"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_one_line_with_file_line_and_word(case: str) -> None:
    text, line, words = ERRORS[case]
    with pytest.raises(PolicyError) as raised:
        Policy.parse(text, "my.yaml")
    message = str(raised.value)
    assert "\n" not in message and len(message) < 240
    assert message.startswith(f"my.yaml:{line}: "), message
    assert words in message


def test_alias_bomb_is_refused_quickly() -> None:
    levels = [V + "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(PolicyError, match="aliases are expanded"):
        Policy.parse("\n".join(levels))


@pytest.mark.parametrize("text", ["[" * 20_000, V + "a: " + "{b: " * 3000])
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match="nested too deeply"):
        Policy.parse(text)


def test_a_file_of_megabytes_is_refused() -> None:
    with pytest.raises(PolicyError, match="larger than 1 MiB"):
        Policy.parse(V + "# " + "x" * (1 << 20))


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "no.yaml", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(PolicyError, match=words) as raised:
            Policy.load(path)
        assert str(raised.value).startswith(str(path))


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"version: 1\n# caf\xe9\n")
    with pytest.raises(PolicyError, match=r"latin.yaml:2: not UTF-8 \(byte 0xe9\)"):
        Policy.load(path)


def test_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfversion: 1\n")
    assert Policy.load(path).recipe_name == "fp8-exact"


def test_errors_name_the_file_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(V + "recipe: nvida\n")
    with pytest.raises(PolicyError, match="did you mean 'nvidia'") as raised:
        Policy.load(path)
    assert str(raised.value).startswith(f"{path}:2: recipe: ")


def test_unknown_recipe_by_name() -> None:
    with pytest.raises(PolicyError, match="did you mean 'thinking-machines'"):
        Policy.recipe("thinking_machines")


def test_policy_error_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        Policy.parse("")
