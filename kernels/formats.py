"""How one tensor is stored (`TensorFormat`), what one layer does (`Scheme`), as data and as text.

Both have one canonical text, which is what the graphs show and what the operators take as
arguments:

    nvfp4:row:fp8_exact        NVFP4, one outer scale a row, block scales of the FP8-exact set
    nvfp4:tensor:tile          NVFP4 weight in 16x16 tiles
    nvfp4:row:four_over_six    with the four-over-six scale search
    nvfp4:row:fp8_exact:half   FP8-exact with the scale search in FP16 arithmetic
    mxfp8:32:sr                MXFP8, blocks of 32, stochastic rounding
    fp8:128, fp8:tile          E4M3 with an FP32 scale for 1x128 elements, for a tile of 128x128

    fprop(nvfp4:row:fp8_exact, nvfp4:tensor:fp8_exact) dgrad(mxfp8:row:sr, fprop)
        wgrad(mxfp8:row:sr:fold, fprop)   (in one line)

A GEMM reads its operands in the order (activation, weight), (gradient, weight), (gradient,
activation). A backward operand is `fprop` (the saved codes, exactly), `fprop>FORMAT` (the saved
codes decoded, transposed, quantized again) or `input>FORMAT` (the high-precision tensor quantized
in the forward along the axis that this GEMM reduces).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from .errors import FormatError

Search = None | str | tuple[float, ...]

FORMATS = ("nvfp4", "mxfp8", "mxfp4", "s2f6", "fp8")
BLOCK = {"nvfp4": 16, "mxfp8": 32, "mxfp4": 32, "s2f6": 32, "fp8": 128}
BITS = {"nvfp4": 4, "mxfp8": 8, "mxfp4": 4, "s2f6": 8, "fp8": 8}
SEARCHES = ("four_over_six", "half")
# What each keyword may say, per format; the first word is the default.
CHOICES: dict[str, dict[str, tuple]] = {
    "nvfp4": {
        "outer": ("tensor", "row"),
        "block": ("1x16", "tile"),
        "block_scales": ("e4m3", "fp8_exact"),
        "rounding": ("nearest", "stochastic"),
        "rotation": (None, 16, 32),
    },
    "mxfp8": {
        "block": (32, 128, "row"),
        "rounding": ("nearest", "stochastic"),
        "rotation": (None, 16, 32),
    },
    "mxfp4": {
        "block": (32,),
        "rounding": ("nearest", "stochastic"),
        "rotation": (None, 16, 32),
    },
    "s2f6": {"block": (32,), "rounding": ("nearest",), "rotation": (None, 16, 32)},
    "fp8": {
        "block": (128, "tile"),
        "rounding": ("nearest", "stochastic"),
        "rotation": (None, 16, 32),
    },
}


@dataclass(frozen=True)
class TensorFormat:
    """How a tensor is stored; the keyword arguments of `fp4compile.quantize`.

    Fields that a format does not have (``outer`` of MXFP8, say) are None. Illegal combinations
    raise `FormatError` on construction. Formulas: docs/numerics.md.
    """

    format: str
    outer: str | None = None
    block: str | int | None = None
    block_scales: str | None = None
    scale_search: Search = None
    rounding: str = "nearest"
    rotation: int | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise FormatError(f"unknown format {self.format!r}; known: {', '.join(FORMATS)}")
        choices = CHOICES[self.format]
        for key, allowed in choices.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, allowed[0])
        if isinstance(self.scale_search, list):
            object.__setattr__(self, "scale_search", tuple(float(f) for f in self.scale_search))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("format", "scale_search"):
                continue
            if field.name not in choices:
                if value is not None:
                    raise FormatError(f"{self.format} has no {field.name} (got {value!r})")
            elif value not in choices[field.name]:
                words = ", ".join(str(w) for w in choices[field.name])
                raise FormatError(f"{self.format}: {field.name}={value!r} is none of {words}")
        self._check_search()
        self._check_nvfp4()

    def _check_nvfp4(self) -> None:
        if self.block == "tile" and self.outer == "row":
            raise FormatError("16x16 tiles have one outer scale for the tensor: use outer: tensor")
        if self.block_scales == "fp8_exact" and self.block == "tile":
            raise FormatError("block_scales: fp8_exact is defined for block: 1x16, not for tiles")
        if self.block_scales == "fp8_exact" and self.stochastic:
            raise FormatError("block_scales: fp8_exact has a scale search: rounding is nearest")

    def _check_search(self) -> None:
        search = self.scale_search
        if search is None:
            return
        if self.format != "nvfp4":
            raise FormatError(f"{self.format} has no scale_search")
        if isinstance(search, str) and search not in SEARCHES:
            raise FormatError(f"scale_search={search!r} is none of {', '.join(SEARCHES)}, a list")
        if isinstance(search, tuple) and not (search and all(0 < f < float("inf") for f in search)):
            raise FormatError("scale_search: a list of positive factors is needed")
        if isinstance(search, tuple) and not all(0.5 <= f <= 2 for f in search):
            worst = next(f for f in search if not 0.5 <= f <= 2)
            raise FormatError(
                f"scale_search: factor {worst:g} is outside 0.5 to 2: a block's scale times it"
                " leaves no code for most values"
            )
        if self.rounding == "stochastic":
            raise FormatError("a scale search cannot be combined with stochastic rounding (biased)")
        if self.block == "tile":
            raise FormatError("a scale search cannot be combined with 16x16 tiles")
        if (search == "half") != (self.block_scales == "fp8_exact"):
            raise FormatError(
                "scale_search: half belongs to block_scales: fp8_exact, which has no other search"
                " beside its own in FP32"
            )

    @property
    def stochastic(self) -> bool:
        """True where rounding needs random bits."""
        return self.rounding == "stochastic"

    @property
    def exact_in_fp8(self) -> bool:
        """True where code x block scale is an E4M3 number (times `outer`), exactly."""
        return self.block_scales == "fp8_exact" or (self.format == "mxfp8" and self.block == "row")

    @property
    def float_scales(self) -> bool:
        """True where block scales are FP32 numbers, which a GEMM reads beside the codes."""
        return self.format == "fp8"

    @property
    def padding(self) -> int:
        """The quantized axis is padded to a multiple of it: the block, or the rotation's group."""
        return max(BLOCK[self.format], self.rotation or 0)

    @property
    def factor(self) -> str | None:
        """What a GEMM's result is multiplied with: one factor a "row", a "tensor", or none."""
        if self.format == "nvfp4":
            return self.outer
        return "row" if self.block == "row" else None

    def __str__(self) -> str:
        words = [self.format]
        if self.format == "nvfp4":
            words.append(str(self.outer))
            words += [w for w in (self.block, self.block_scales) if w in ("tile", "fp8_exact")]
        elif self.format in ("mxfp8", "fp8"):
            words.append(str(self.block))
        if isinstance(self.scale_search, str):
            words.append(self.scale_search)
        elif self.scale_search:
            factors = (repr(float(f)).removesuffix(".0") for f in self.scale_search)
            words.append("search=" + "/".join(factors))
        words += ["sr"] * self.stochastic
        words += [f"had{self.rotation}"] if self.rotation else []
        return ":".join(words)

    @staticmethod
    @cache
    def parse(text: str) -> TensorFormat:
        """The format whose canonical text is ``text``."""
        name, *words = text.split(":")
        keys: dict = {}
        for word in words:
            keys.update(_keyword(name, word))
        return TensorFormat(name, **keys)


def _keyword(name: str, word: str) -> dict:
    """The keyword argument that one word of a canonical text stands for."""
    if word.startswith("search="):
        try:
            return {"scale_search": tuple(float(f) for f in word[7:].split("/"))}
        except ValueError:
            raise FormatError(f"{word!r} is no list of factors") from None
    fixed: dict[str, dict] = {
        "sr": {"rounding": "stochastic"},
        "tile": {"block": "tile"},
        "fp8_exact": {"block_scales": "fp8_exact"},
        "four_over_six": {"scale_search": "four_over_six"},
        "half": {"scale_search": "half"},
        "had16": {"rotation": 16},
        "had32": {"rotation": 32},
        "32": {"block": 32},
        "128": {"block": 128},
        "tensor": {"outer": "tensor"},
        "row": {"outer": "row"} if name == "nvfp4" else {"block": "row"},
    }
    if word not in fixed:
        raise FormatError(f"unknown word {word!r} in format {name!r}")
    return fixed[word]


@dataclass(frozen=True)
class Operand:
    """One operand of a GEMM: its format, where it comes from, and what is folded into it.

    ``source``: "own" (quantized where it is read), "fprop" (the saved codes of the forward operand;
    as they are without a format, decoded and quantized again with one) or "input" (the
    high-precision tensor, quantized in the forward along this GEMM's reduction axis).
    ``fold``: "outer" multiplies each token's outer scale of the activation into the gradient row.
    """

    format: TensorFormat | None = None
    source: str = "own"
    fold: str | None = None

    def __str__(self) -> str:
        text = str(self.format) if self.format else ""
        if self.source != "own":
            text = self.source + (">" + text if text else "")
        return text + (":fold" if self.fold else "")

    @staticmethod
    def parse(text: str) -> Operand:
        """The operand whose canonical text is ``text``."""
        fold = "outer" if text.endswith(":fold") else None
        text = text.removesuffix(":fold")
        source, _, rest = text.partition(">")
        if source in ("fprop", "input"):
            return Operand(TensorFormat.parse(rest) if rest else None, source, fold)
        return Operand(TensorFormat.parse(text), "own", fold)


PREACTIVATION = TensorFormat("mxfp8", block=32)  # the other precision that one may be kept in

Gemm = tuple[Operand, Operand]
GEMMS = {
    "fprop": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient", "activation"),
}


@dataclass(frozen=True)
class Scheme:
    """The operands of a layer's three GEMMs; None means the original precision.

    fprop: y[M, N] = x[M, K] w[N, K]^T; dgrad: dx[M, K] = g[M, N] w[N, K]; wgrad: dw[N, K] =
    g[M, N]^T x[M, K]. ``preactivation``: how a chain's first layer keeps its result for the
    activation's derivative, if not as it is. Construction raises `FormatError` for operands that
    cannot be multiplied.
    """

    fprop: Gemm | None = None
    dgrad: Gemm | None = None
    wgrad: Gemm | None = None
    preactivation: TensorFormat | None = None

    def __post_init__(self) -> None:
        if self.preactivation not in (None, PREACTIVATION):
            raise FormatError(f"preactivation: {self.preactivation} is not {PREACTIVATION}")
        if self.preactivation and self.original:
            raise FormatError("preactivation: nothing of the scheme is quantized")
        for name, roles in GEMMS.items():
            gemm = getattr(self, name)
            if gemm is not None:
                self._check(name, dict(zip(roles, gemm)))

    def _check(self, name: str, operands: dict[str, Operand]) -> None:
        for role, op in operands.items():
            where = f"{name}.{role}"
            if role == "gradient" or name == "fprop":
                if op.source != "own" or op.format is None:
                    raise FormatError(f"{where}: a format is needed, not from: {op.source}")
            elif op.source == "own":
                raise FormatError(f"{where}: say where it comes from (from: fprop or from: input)")
            if op.source == "fprop" and self.fprop is None:
                raise FormatError(f"{where}: from: fprop, but fprop is original; use from: input")
            if op.source == "input" and (op.format is None or op.format.stochastic):
                raise FormatError(f"{where}: from: input needs a format rounded to nearest")
            if op.fold and (name, role) != ("wgrad", "gradient"):
                raise FormatError(f"{where}: fold belongs to wgrad.gradient")
            if op.format and op.format.block == "tile" and role != "weight":
                raise FormatError(f"{where}: tiles are for weights")
            if op.format and op.format.outer == "row" and op.format.stochastic:
                raise FormatError(f"{where}: outer: row is for forward operands; use tensor")
        left, right = operands.values()
        if self._rotation(left) != self._rotation(right):
            raise FormatError(f"{name}: rotation must be the same on both operands to cancel")
        if name == "fprop":
            if left.format and left.format.stochastic or right.format and right.format.stochastic:
                raise FormatError("fprop: the forward pass has no stochastic rounding")
            return
        self._check_reuse(name, left, right)

    def _check_reuse(self, name: str, gradient: Operand, other: Operand) -> None:
        """Saved codes can be read along the other axis only where that is exact."""
        saved = self.fprop[1 if name == "dgrad" else 0].format if self.fprop else None
        role = GEMMS[name][1]
        if other.source == "fprop" and saved is not None and saved.rotation:
            raise FormatError(
                f"{name}.{role}: rotated codes are not for other GEMMs; from: input is"
            )
        if other.source != "fprop" or other.format is not None:
            if gradient.fold:
                raise FormatError(
                    f"{name}.gradient: fold needs the activation from: fprop as it is"
                )
            return
        assert saved is not None
        tile = saved.block == "tile"
        if not (tile or saved.block_scales == "fp8_exact"):
            raise FormatError(
                f"{name}.{role}: from: fprop needs block_scales: fp8_exact or block: tile; "
                f"{saved} must be quantized again (add a format)"
            )
        if role == "activation" and saved.outer == "row" and not gradient.fold:
            raise FormatError(
                f"{name}.gradient: fold: outer is needed, the activation has row scales"
            )
        if role == "activation" and saved.outer != "row" and gradient.fold:
            raise FormatError(f"{name}.gradient: nothing to fold, the activation has no row scales")
        if role == "weight" and saved.outer == "row":
            raise FormatError("dgrad.weight: from: fprop needs outer: tensor")

    @staticmethod
    def _rotation(op: Operand) -> int | None:
        return op.format.rotation if op.format else None

    def format_of(self, name: str, side: int) -> TensorFormat:
        """The format of an operand of GEMM ``name``; of the saved codes where it has none."""
        operand: Operand = getattr(self, name)[side]
        if operand.format is not None:
            return operand.format
        assert self.fprop is not None
        saved = self.fprop[1 if name == "dgrad" else 0].format
        assert saved is not None
        return saved

    @property
    def original(self) -> bool:
        """True where nothing is quantized."""
        return self.fprop is None and self.dgrad is None and self.wgrad is None

    def __str__(self) -> str:
        if self.original:
            return "original"
        parts = []
        for name in GEMMS:
            gemm = getattr(self, name)
            inner = f"{gemm[0]}, {gemm[1]}" if gemm else "original"
            parts.append(f"{name}({inner})")
        if self.preactivation:
            parts.append(f"preactivation({self.preactivation})")
        return " ".join(parts)

    @staticmethod
    @cache
    def parse(text: str) -> Scheme:
        """The scheme whose canonical text is ``text``."""
        if text == "original":
            return Scheme()
        gemms: dict[str, Gemm | None] = {}
        kept: TensorFormat | None = None
        for part in text.split(") "):
            name, _, inner = part.removesuffix(")").partition("(")
            if name == "preactivation" and kept is None:
                kept = TensorFormat.parse(inner)
                continue
            if name not in GEMMS or name in gemms:
                raise FormatError(f"unknown or repeated GEMM {name!r} in scheme {text!r}")
            words = inner.split(", ")
            if inner != "original" and len(words) != 2:
                raise FormatError(f"{name}: two operands or original, not {inner!r}")
            gemms[name] = (
                None if inner == "original" else (Operand.parse(words[0]), Operand.parse(words[1]))
            )
        return Scheme(**gemms, preactivation=kept)
