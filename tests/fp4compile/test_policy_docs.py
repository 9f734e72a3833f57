"""Every YAML example of docs/policy.md is a policy, and its tables name what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fp4compile.kernels.formats import CHOICES
from policy_models import Gpt

from fp4compile.policy import Policy, recipes
from fp4compile.policy_model import OperandEntry, PolicyEntry, RuleEntry

TEXT = (Path(__file__).parents[2] / "docs" / "policy.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def keys_of_table(header: str) -> set[str]:
    """The code words in the first column of the table whose first header is ``header``."""
    table = TEXT.split(f"| {header} |", 1)[1].split("\n\n")[0]
    return set(re.findall(r"^\| `(\w[\w-]*)", table, re.MULTILINE))


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_parse(text: str) -> None:
    Policy.parse(text)


def test_examples_are_all_there() -> None:
    assert len(EXAMPLES) == 7


def test_the_example_scheme_is_the_recipes() -> None:
    assert Policy.parse(EXAMPLES[1]).schemes["mine"] == Policy.default().schemes["low"]


def test_nvidia_without_rotation_differs_in_the_rotation_alone() -> None:
    low = str(Policy.parse(EXAMPLES[5]).schemes["low"])
    assert low == str(Policy.recipe("nvidia").schemes["low"]).replace(":had16", "")


def test_the_mixed_example() -> None:
    stamps = Policy.parse(EXAMPLES[3]).resolve(Gpt(12))
    got = [stamps[name].plain.scheme_name for name in ("h.1.mlp.up", "h.2.mlp.up", "h.2.attn.qkv")]
    assert got == ["original", "low", "mxfp8"]


def test_tables_name_every_key() -> None:
    assert keys_of_table("key") == set(PolicyEntry.model_fields)
    fields = {field.alias or name for name, field in OperandEntry.model_fields.items()}
    assert keys_of_table("operand key") == fields
    assert keys_of_table("selector") == set(RuleEntry.model_fields) - {"scheme"}
    assert keys_of_table("recipe") == set(recipes())


def test_defaults_come_first() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:nvfp4[^:|]*: )?`([^`]+)`", TEXT, re.MULTILINE))
    for key in ("outer", "block", "block_scales", "rounding"):
        assert rows[key] == CHOICES["nvfp4"][key][0]
