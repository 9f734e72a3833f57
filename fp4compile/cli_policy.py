"""``fp4compile policy check|init|schema``."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_errors import one_line_errors
from .kernels.errors import PolicyError

if TYPE_CHECKING:
    from torch import nn

    from .policy import Policy, Resolution
    from .stamp import Stamp

app = typer.Typer(help="Check a policy file, or start one.", no_args_is_help=True)

STARTER = """\
# Which precision each layer gets. Keys: docs/policy.md; check with `fp4compile policy check`.
version: 1
recipe: {recipe}

# true: a rule that holds for no layer, or a layer that it names and that cannot be rewritten, is an
# error instead of a warning.
strict: false

# First match wins, before the recipe's own rules. Uncomment and change:
layers:
#  - {{match: "lm_head", scheme: original}}          # a glob on the whole name; * crosses dots
#  - {{match: 're:.*\\.attn\\.(qkv|proj)', scheme: original}}   # a regex for the whole name
#  - {{blocks: last 16.6%, scheme: mxfp8}}           # also first 2, last 4, first 10%
#  - {{chain: mlp, scheme: low}}                     # linear, activation, linear; gated ones too

# What the recipe {recipe} does after the rules above:
{rules}

# Late in training: fp4.apply(model, policy, step=n)
phases:
#  - {{from_step: 8200, fprop: original}}
"""


@app.command()
@one_line_errors
def check(
    file: Annotated[Path, typer.Argument(help="the policy file")],
    model: Annotated[
        str | None, typer.Option(help="module:factory, a function that returns the model")
    ] = None,
    step: Annotated[int | None, typer.Option(help="the training step, for phases")] = None,
) -> None:
    """Check a policy file; with --model also say what each of its layers gets."""
    from .policy import Policy

    policy = Policy.load(file)
    if model is None:
        typer.echo(f"{file}: good ({_summary(policy)})")
        return
    net = build(model)
    resolution = policy.resolve(net, step)
    for warning in resolution.warnings:
        typer.secho(f"warning: {warning}", fg="yellow", err=True)
    typer.echo(_table(resolution))
    typer.echo(f"{file}: good ({_summary(policy)})")


@app.command()
@one_line_errors
def init(
    file: Annotated[Path, typer.Argument(help="the file to write")],
    recipe: Annotated[str, typer.Option(help="the recipe to start from")] = "fp8-exact",
    force: Annotated[bool, typer.Option(help="replace an existing file")] = False,
) -> None:
    """Write a commented policy file to start from."""
    from .policy import Policy

    base = Policy.recipe(recipe)
    if file.exists() and not force:
        raise PolicyError(f"{file}: exists already (--force replaces it)")
    rules = [f"#   {rule.selectors}: {rule.scheme}" for rule in base.rules]
    rules.append(f"#   everything else: {base.default_rule[0]}")
    text = STARTER.format(recipe=recipe, rules="\n".join(rules))
    Policy.parse(text, str(file)).save(file)
    typer.echo(f"wrote {file}")


@app.command()
def schema() -> None:
    """Print the path of the JSON schema, for editors that complete and check YAML."""
    typer.echo(str(Path(__file__).with_name("policy_schema.json")))


def call(spec: str) -> Any:
    """What the user's function ``module:factory`` returns; `PolicyError` where it cannot be had."""
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise PolicyError(f"{spec}: module:factory is needed, such as train:make_model")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(name), attribute)()
    except Exception as exc:  # the user's own code: whatever it raises is shown in one line
        text = " ".join(f"{type(exc).__name__}: {exc}".split())
        raise PolicyError(f"{spec}: {text}") from None
    finally:
        sys.path.remove(os.getcwd())


def call_pair(spec: str, second: str) -> tuple[nn.Module, Any]:
    """What ``module:factory`` returns where it must be (module, ``second``); else `PolicyError`."""
    from torch import nn

    made = call(spec)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise PolicyError(f"{spec}: returned {type(made).__name__}; return (module, {second})")
    return made


def build(spec: str) -> nn.Module:
    """The model that ``module:factory`` returns, alone or as (model, args)."""
    from torch import nn

    made = call(spec)
    model = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(model, nn.Module):
        raise PolicyError(f"{spec}: returned {type(model).__name__}, not a torch module")
    return model


def _summary(policy: Policy) -> str:
    own = sum(not rule.own for rule in policy.rules)
    parts = [f"recipe {policy.recipe_name}", f"{own} rule{'s' * (own != 1)} of its own"]
    parts += [f"{len(policy.phases)} phase{'s' * (len(policy.phases) != 1)}"] * bool(policy.phases)
    return ", ".join([*parts, *["strict"] * policy.strict])


def _table(resolution: Resolution) -> str:
    """Layers of equal name (numbers aside) and equal stamp in one row; rules by number below."""
    from .tables import Notes, table, terminal_width

    notes, width = Notes(), terminal_width()
    rows = [
        (name, str(count), chain, plain, notes.refer(rules))
        for (name, chain, plain, rules), count in _rows(resolution).items()
    ]
    flexible = ("layer", "in an MLP chain", "otherwise")
    lines = table(("layer", "layers", *flexible[1:], "why"), rows, width, flexible)
    return "\n".join([*lines, "", "why:", *notes.lines(width), ""])


def _rows(resolution: Resolution) -> Counter[tuple[str, str, str, tuple[str, str]]]:
    return Counter(_row(name, stamp) for name, stamp in resolution.items())


def _row(name: str, stamp: Stamp) -> tuple[str, str, str, tuple[str, str]]:
    rules = stamp.chain.rule, stamp.plain.rule
    pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
    return pattern, stamp.chain.scheme_name, stamp.plain.scheme_name, rules
