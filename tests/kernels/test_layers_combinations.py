"""Pairs of operand formats, 3000 and more, work by reference; illegal ones say why in one line."""

from __future__ import annotations

import itertools
import random

import pytest
from fp4compile.kernels.errors import FormatError
from fp4compile.kernels.formats import Scheme, TensorFormat
from test_layers_equality import check_linear

NEAREST = (
    "nvfp4:row", "nvfp4:tensor", "nvfp4:tensor:tile", "nvfp4:row:four_over_six",
    "nvfp4:tensor:search=0.875/1/1.5", "nvfp4:row:fp8_exact", "nvfp4:tensor:fp8_exact",
    "nvfp4:row:fp8_exact:half", "mxfp8:32", "mxfp8:128", "mxfp8:row", "mxfp4", "s2f6",
    "fp8:128", "fp8:tile",
)  # fmt: skip
STOCHASTIC = (
    "nvfp4:tensor:sr", "nvfp4:tensor:tile:sr", "mxfp8:32:sr", "mxfp8:128:sr", "mxfp8:row:sr", "mxfp4:sr",
    "fp8:128:sr", "fp8:tile:sr",
)  # fmt: skip
OTHERS = tuple(
    f"{source}>{fmt}"
    for source, formats in (("fprop", NEAREST + STOCHASTIC), ("input", NEAREST))
    for fmt in formats
)
EXACT = ("fprop",) * 6  # codes as they are: legal with few formats, so drawn more often
SLOTS = (
    NEAREST, NEAREST, NEAREST + STOCHASTIC, (*EXACT, *OTHERS), NEAREST + STOCHASTIC,
    (*EXACT, *OTHERS),
)  # fmt: skip
ROTATIONS = ("", "", ":had16", ":had32")


def draw(choose: random.Random) -> list[str]:
    """Operands of fprop, dgrad and wgrad; the two of a GEMM are rotated alike."""
    words = [choose.choice(slot) for slot in SLOTS]
    for gemm in range(3):
        rotation = choose.choice(ROTATIONS)
        for i in (2 * gemm, 2 * gemm + 1):
            words[i] += rotation if words[i] != "fprop" else ""
    if choose.random() < 0.1 and words[5] == "fprop":
        words[4] += ":fold"
    return words


def text_of(words: list[str]) -> str:
    pairs = (", ".join(words[i : i + 2]) for i in (0, 2, 4))
    return "fprop({}) dgrad({}) wgrad({})".format(*pairs)


def pairs_of(words: list[str]) -> set:
    return set(itertools.combinations(enumerate(words), 2))


def legal_schemes() -> tuple[list[str], dict[str, str], set]:
    """360 schemes, each with 13 pairs or more that are new, of 15; reasons of the refused ones."""
    choose, seen, found, refused = random.Random(4), set(), [], {}
    while len(found) < 360:
        words = draw(choose)
        text = text_of(words)
        try:
            Scheme.parse(text)
        except FormatError as error:
            refused[text] = str(error)
            continue
        new = pairs_of(words) - seen
        if len(new) >= 13:
            seen |= new
            found.append(text)
    return found, refused, seen


FOUND, REFUSED, SEEN = legal_schemes()


@pytest.mark.parametrize("part", range(8))
def test_legal_pairs(part: int) -> None:
    for text in FOUND[part::8]:
        assert str(Scheme.parse(text)) == text
        check_linear(text, 17, 48, 33, False)


def test_every_format_is_somewhere() -> None:
    """Of each operand, every format that it may have."""
    assert len(SEEN) > 3000
    used = [set(), set(), set(), set(), set(), set()]
    for text in FOUND:
        scheme = Scheme.parse(text)
        operands = [op for gemm in (scheme.fprop, scheme.dgrad, scheme.wgrad) for op in gemm]
        for words, op in zip(used, operands):
            words.add(str(op).removesuffix(":fold").split(":had")[0])
    for slot, words in zip(SLOTS, used):
        never = set(slot) - words
        # 16x16 tiles are for weights; formats rounded stochastically must not be read along the
        # other axis as they are
        assert all("tile" in word for word in never), never


def test_refusals_say_why() -> None:
    assert len(set(REFUSED.values())) >= 6
    for reason in REFUSED.values():
        assert "\n" not in reason and len(reason) < 200, reason
    for keywords, why in (
        ({"scale_search": "four_over_six", "rounding": "stochastic"}, "biased"),
        ({"block": "tile", "outer": "row"}, "one outer scale"),
    ):
        with pytest.raises(FormatError, match=why):
            TensorFormat("nvfp4", **keywords)
    with pytest.raises(FormatError, match="tiles are for weights"):
        Scheme.parse("fprop(nvfp4:tensor:tile, nvfp4:tensor)")
    with pytest.raises(FormatError, match="rotation must be the same on both operands"):
        Scheme.parse("fprop(nvfp4:row:had16, nvfp4:tensor)")
