"""`fp4compile policy check|init|schema`: exit codes, one red line on stderr, what init writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fp4compile.cli import app
from fp4compile.policy import Policy, recipes


def call(*args: object) -> Result:
    return CliRunner().invoke(app, ["policy", *map(str, args)])


def failed(result: Result, words: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("recipe", recipes())
def test_init_writes_a_policy_that_checks(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    assert call("init", path, "--recipe", recipe).exit_code == 0
    result = call("check", path)
    assert result.exit_code == 0 and f"good (recipe {recipe}, 0 rules" in result.stdout
    assert str(Policy.load(path)) == str(Policy.recipe(recipe))


def test_the_starters_examples_are_rules_once_uncommented(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    call("init", path)
    policy = Policy.parse(path.read_text().replace("#  - ", "  - "))
    assert sum(not rule.own for rule in policy.rules) == 4 and len(policy.phases) == 1


def test_init_keeps_an_existing_file_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("mine")
    failed(call("init", path), "exists already")
    assert path.read_text() == "mine"
    assert call("init", path, "--force").exit_code == 0


def test_errors_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nlayrs: []\n")
    failed(call("check", path), f"{path}:2: layrs: unknown key 'layrs'; did you mean 'layers'?")
    failed(call("check", tmp_path / "no.yaml"), "no such file")
    failed(call("init", path, "--recipe", "nvida", "--force"), "did you mean 'nvidia'?")


def test_check_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules,
        "policy_models",
        sys.modules.get("policy_models") or __import__("policy_models"),
    )
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\nlayers:\n  - {match: '[l]m_head', scheme: original}\n  - {match: nope, scheme: low}\n"
    )
    result = call("check", path, "--model", "policy_models:make_gpt")
    assert result.exit_code == 0
    assert 'warning: p.yaml:4 match "nope": holds for no layer' in result.stderr
    assert "h.*.mlp.up" in result.stdout and "[l]m_head" in result.stdout
    lines = result.stdout.splitlines()
    assert " ".join(lines[0].split()) == "layer layers in an MLP chain otherwise why"
    rule = next(line for line in lines if "[l]m_head" in line)
    (head,) = [line for line in lines if line.startswith("lm_head")]
    assert head.split()[-1] == rule.split()[0] and max(map(len, lines[:-1])) <= 80
    assert result.stdout.count("chain mlp") <= 2, "each rule is written once"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("policy_models", "module:factory is needed"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("policy_models:nothing", "AttributeError"),
        ("policy_models:Conv1D", "TypeError"),
        ("os:getcwd", "returned str, not a torch module"),
    ],
)
def test_models_that_cannot_be_had(spec: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\n")
    failed(call("check", path, "--model", spec), words)


def test_schema_prints_the_path_of_a_json_schema() -> None:
    assert (
        json.loads(Path(call("schema").stdout.strip()).read_text())["title"] == "fp4compile policy"
    )
