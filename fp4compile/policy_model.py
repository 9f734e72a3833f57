"""The keys of a policy file as pydantic models, and validation errors as one line each.

The same models are the JSON schema for editors, `policy_schema.json`, which
``python -m fp4compile.policy_model`` writes again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from .kernels.errors import PolicyError
from .kernels.formats import SEARCHES
from .policy_yaml import Source
from .words import hint, shown, unknown

SCHEMA = Path(__file__).with_name("policy_schema.json")
ORIGINAL = ("original", "bf16")
AUTO = "auto"  # the recipe's `low` where that is faster, else the original precision


class _Entry(BaseModel):
    """A mapping of the file; an unknown key names the nearest one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            text = "a mapping is needed, not {got}"
            raise PydanticCustomError("shape", text, {"got": shown(data)})
        keys = [field.alias or name for name, field in cls.model_fields.items()]
        for key in data:
            if key not in keys:
                context = {"text": unknown("key", key, keys), "key": key}
                raise PydanticCustomError("key", "{text}", context)
        return data


def _version(value: Any) -> int:
    if type(value) is int and value == 1:
        return 1
    text = "version {got} is unknown; this release reads version 1"
    raise PydanticCustomError("version", text, {"got": shown(value)})


def _search(value: Any) -> Any:
    """``scale_search``: a word, or a list of factors."""
    if isinstance(value, list) and value and all(type(v) in (int, float) for v in value):
        return tuple(float(v) for v in value)
    if value is None or (isinstance(value, str) and value in SEARCHES):
        return value
    text = "{got} is neither four_over_six, half nor a list of factors{hint}"
    context = {"got": shown(value), "hint": hint(value, SEARCHES)}
    raise PydanticCustomError("search", text, context)


_SEARCH_SCHEMA = {
    "anyOf": [
        {"enum": list(SEARCHES)},
        {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 1},
        {"type": "null"},
    ]
}
Search = Annotated[Any, BeforeValidator(_search), WithJsonSchema(_SEARCH_SCHEMA)]


Version = Annotated[int, BeforeValidator(_version), WithJsonSchema({"const": 1})]


class OperandEntry(_Entry):
    """An operand: the keyword arguments of `fp4compile.quantize`, and where it comes from."""

    format: Literal["nvfp4", "mxfp8", "mxfp4", "s2f6", "fp8"] | None = None
    outer: Literal["row", "tensor"] | None = None
    block: Literal["1x16", "tile", 32, 128, "row"] | None = None
    block_scales: Literal["e4m3", "fp8_exact"] | None = None
    scale_search: Search = None
    rounding: Literal["nearest", "stochastic"] | None = None
    rotation: Literal[16, 32] | None = None
    source: Literal["fprop", "input"] | None = Field(None, alias="from")
    fold: Literal["outer"] | None = None


class FpropEntry(_Entry):
    """The operands of y = x w^T."""

    activation: OperandEntry
    weight: OperandEntry


class DgradEntry(_Entry):
    """The operands of dx = g w."""

    gradient: OperandEntry
    weight: OperandEntry


class WgradEntry(_Entry):
    """The operands of dw = g^T x."""

    gradient: OperandEntry
    activation: OperandEntry


def _shape(value: Any) -> str:
    return "word" if isinstance(value, str) else "operands"


_Word = Annotated[Literal["original", "bf16"], Tag("word")]
Fprop = Annotated[_Word | Annotated[FpropEntry, Tag("operands")], Discriminator(_shape)]
Dgrad = Annotated[_Word | Annotated[DgradEntry, Tag("operands")], Discriminator(_shape)]
Wgrad = Annotated[_Word | Annotated[WgradEntry, Tag("operands")], Discriminator(_shape)]


class SchemeEntry(_Entry):
    """A layer's three GEMMs, each its operands or ``original``."""

    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad


class RuleEntry(_Entry):
    """A scheme for the layers that all of the rule's selectors hold for."""

    match: str | None = Field(None, description="glob on the whole dotted name, or re:REGEX")
    blocks: str | None = Field(None, description='"first 2", "last 4", "last 16.6%"')
    chain: Literal["mlp"] | None = None
    scheme: str


_SHARE = r"^\d+(\.\d+)?%$"


def _start(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if (whole and value >= 0) or (isinstance(value, str) and re.match(_SHARE, value)):
        return value
    raise PydanticCustomError(
        "start", "a step from 0 on, or a share of training such as 82%, is needed, not {got}",
        {"got": shown(value)},
    )  # fmt: skip


Start = Annotated[
    Any,
    BeforeValidator(_start),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SHARE}],
            "description": "a step, or a share of training such as 82%",
        }
    ),
]


class PhaseEntry(_Entry):
    """What changes from a step on: single GEMMs, or the whole scheme."""

    from_step: Start
    fprop: str | None = Field(None, description="original, or the scheme to take this GEMM from")
    dgrad: str | None = None
    wgrad: str | None = None
    all: str | None = None
    scheme: str | None = None


class PolicyEntry(_Entry):
    """The whole file."""

    version: Version
    recipe: str | None = None
    strict: bool = False
    save_weight: Literal["codes", "remake"] = "codes"
    save_preactivation: Literal["original", "mxfp8"] = Field(
        "original", description="how a chain keeps what its activation's derivative needs"
    )
    machine: str | None = Field(
        None, description="the GPU that `scheme: auto` chooses for; default: the present one"
    )
    layers: list[RuleEntry] | None = None
    default: str | None = None
    schemes: dict[str, SchemeEntry] | None = None
    phases: list[PhaseEntry] | None = None


def validate(data: dict, source: Source) -> PolicyEntry:
    """The model of a policy's data; the first error as a `PolicyError` with its line."""
    try:
        return PolicyEntry.model_validate(data)
    except ValidationError as exc:
        raise _one_line(exc.errors(include_url=False)[0], source) from None


_NEEDED = {
    "string_type": "a text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "list_type": "a list",
    "dict_type": "a mapping",
}


_ADVICE: dict[int | str, str] = {
    "version": " (write `version: 1`)",
    **dict.fromkeys(("fprop", "dgrad", "wgrad"), " (`original` keeps that GEMM as it is)"),
}


def _one_line(error: ErrorDetails, source: Source) -> PolicyError:
    kind, path, value = error["type"], error["loc"], error["input"]
    context = error.get("ctx", {})
    if kind == "key":
        return source.error((*path, context["key"]), context["text"])
    if kind == "missing":
        return source.error(path[:-1], f"{path[-1]!r} is missing{_ADVICE.get(path[-1], '')}")
    if kind in _NEEDED:
        quote = " (quote it)" if kind == "string_type" and isinstance(value, (int, float)) else ""
        return source.error(path, f"{_NEEDED[kind]} is needed, not {shown(value)}{quote}")
    if kind == "greater_than_equal":
        return source.error(path, f"{context['ge']} or more is needed, not {shown(value)}")
    if kind == "literal_error":
        return source.error(path, _not_one_of(value, context["expected"]))
    return source.error(path, error["msg"][:1].lower() + error["msg"][1:])


def _not_one_of(value: object, expected: str) -> str:
    """Turns pydantic's ``'a', 'b' or 3`` into a sentence with the nearest word."""
    words = [a or b for a, b in re.findall(r"'([^']*)'|(\d+)", expected)]
    return f"{shown(value)} is none of {', '.join(words)}{hint(value, words)}"


def schema() -> dict:
    """The JSON schema of a policy file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PolicyEntry.model_json_schema(by_alias=True),
        "title": "fp4compile policy",
    }


def write_schema(path: Path = SCHEMA) -> None:
    """Writes the JSON schema that editors read."""
    path.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_schema()
