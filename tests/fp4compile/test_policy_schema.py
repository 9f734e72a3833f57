"""The JSON schema that editors read says what the loader says."""

from __future__ import annotations

import json
from typing import Any, get_args

from fp4compile.kernels.formats import CHOICES, FORMATS, GEMMS

from fp4compile.policy_model import SCHEMA, OperandEntry, PolicyEntry, schema


def plain(node: Any) -> Any:
    """Without titles and texts, which differ between pydantic versions."""
    if isinstance(node, dict):
        return {k: plain(v) for k, v in node.items() if k not in ("title", "description")}
    return [plain(v) for v in node] if isinstance(node, list) else node


def test_the_shipped_schema_is_up_to_date() -> None:
    shipped = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert plain(shipped) == plain(schema()), "run python -m fp4compile.policy_model"


def test_every_mapping_refuses_unknown_keys() -> None:
    shipped = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for entry in [shipped, *shipped["$defs"].values()]:
        assert entry["additionalProperties"] is False


def test_operand_words_are_the_formats_words() -> None:
    def words(key: str) -> set:
        return {
            w
            for part in get_args(OperandEntry.model_fields[key].annotation)
            for w in get_args(part)
        }

    assert words("format") == set(FORMATS)
    for key in ("outer", "block", "block_scales", "rounding", "rotation"):
        known = {w for choices in CHOICES.values() for w in choices.get(key, ())} - {None}
        assert words(key) == known, key


def test_gemms_have_their_roles() -> None:
    defs = schema()["$defs"]
    for gemm, roles in GEMMS.items():
        assert tuple(defs[f"{gemm.capitalize()}Entry"]["properties"]) == roles
    assert "version" in PolicyEntry.model_fields
