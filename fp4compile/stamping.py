"""Stamps: each layer of a model carries its scheme, so that any way of compiling it agrees.

Dynamo compiles a block once and runs the graph for every block of its class, and below a graph
break it sees submodules without their names. A stamp (``module.fp4_scheme``, a text) is guarded by
the compiled graph: equal stamps share a graph, a changed stamp compiles again.

A linear's stamp is ``fp4_scheme``; that of another matrix which a module owns, ``w1`` say, which
may be the weight of an ``F.linear``, is ``fp4_scheme_w1``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from . import dynamo, watching
from .blocks import clean_name, find_blocks, is_linear, other_matrices
from .kernels.errors import PolicyError
from .notices import warn
from .policy import Policy, Resolution
from .stamp import Stamp
from .words import shown

INFO = "fp4_info"
STAMP = dynamo.STAMP


def apply(
    model: nn.Module, policy: Policy | str | Path | Mapping, step: int | None = None
) -> dict[str, str]:
    """Stamp every linear of ``model`` with its scheme under ``policy`` at training step ``step``.

    Needed before compiling block by block, under FSDP2 and for phases; on a running compiled model
    it takes effect at the next call (one compilation per new state, none on return). Returns the
    stamps by layer name. ``policy`` is a `Policy`, a file's path, a recipe's name or a dict.

    Raises:
        PolicyError: for a policy that cannot be used, or that names no layer when strict.
        PrecisionError: where this version of torch cannot guard stamps.
    """
    from .backend import as_policy

    _check(model, step)
    dynamo.self_test()
    policy = as_policy(policy)
    resolution = policy.resolve(model, step)
    late = [phases_message(policy)] if policy.phases and step is None else []
    for warning in [*resolution.warnings, *late]:
        warn(warning)
    stamp_modules(model, policy, resolution, step)
    states = len({str(s) for s in resolution.values()}) * (1 + len(policy.phases))
    dynamo.allow_graphs(2 * states)
    return {name: str(stamp) for name, stamp in resolution.items()}


def phases_message(policy: Policy) -> str:
    """What is said where phases are given and nobody tells the step."""
    return (
        f"policy {policy.name}: its phases begin only where fp4.apply(model, policy, step=n) is"
        " called; until then the rules hold"
    )


def _check(model: Any, step: Any) -> None:
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise PolicyError(f"fp4.apply(model, policy): the model comes first, not a {kind}")
    whole = isinstance(step, Integral) and not isinstance(step, bool)
    if step is not None and not (whole and step >= 0):
        raise PolicyError(f"fp4.apply: step={shown(step)}: 0 or a larger whole number is needed")


def digest(policy: Policy) -> str:
    """A short text that is equal for policies that decide alike."""
    return hashlib.sha256(str(policy).encode()).hexdigest()[:16]


def stamp_modules(
    model: nn.Module,
    policy: Policy,
    resolution: Resolution,
    step: int | None = None,
    automatic: bool = False,
) -> None:
    """Write stamps and what `explain` says about them; watch each linear.

    ``automatic``: by the backend, below a graph break; stamps of another policy may replace these.
    """
    texts: dict[Stamp, str] = {}
    base = {"policy": digest(policy), "label": policy.name, "automatic": automatic}
    for module, name, attribute, stamp in _stamps(model, policy, resolution, step):
        if automatic and _by_user(module, attribute):
            continue
        setattr(module, attribute, texts.setdefault(stamp, str(stamp)))
        info = module.__dict__.setdefault(INFO, {})
        rules = [(d.scheme_name, d.rule) for d in (stamp.chain, stamp.plain)]
        info.update(base, rules={**info.get("rules", {}), attribute: rules})
        if attribute == STAMP:
            info["name"] = name
        if attribute == STAMP and is_linear(module):
            watching.watch(module, stamp, name)


def _by_user(module: nn.Module, attribute: str) -> bool:
    return attribute in module.__dict__ and not module.__dict__.get(INFO, {}).get("automatic")


def _stamps(
    model: nn.Module, policy: Policy, resolution: Resolution, step: int | None
) -> Iterator[tuple[nn.Module, str, str, Stamp]]:
    """Every matrix of the model: (module, name, attribute, stamp)."""
    blocks = find_blocks(model)
    for fqn, module in model.named_modules():
        if module in resolution.modules:
            yield module, clean_name(fqn), STAMP, resolution.modules[module]
    for module, parameter, name in other_matrices(model):
        block = blocks.block_of(name) if blocks else None
        yield module, name, attribute_of(parameter), policy.stamp_for(name, block, step)


def attribute_of(parameter: str) -> str:
    """The attribute of a module that holds the stamp of one of its parameters."""
    return STAMP if parameter == "weight" else f"{STAMP}_{parameter}"


def name_of(module: nn.Module) -> str:
    """The name that a stamped module has in its model; "" if it is not stamped."""
    return module.__dict__.get(INFO, {}).get("name", "")


def stamp_of(module: nn.Module, attribute: str = STAMP) -> Stamp | None:
    """The stamp that a module carries, with the rules that `apply` wrote beside it."""
    text = module.__dict__.get(attribute)
    if text is None:
        return None
    stamp = Stamp.parse(text)
    rules = module.__dict__.get(INFO, {}).get("rules", {}).get(attribute)
    if rules is None:
        return stamp
    chain, plain = (
        replace(d, scheme_name=name, rule=rule)
        for d, (name, rule) in zip((stamp.chain, stamp.plain), rules)
    )
    return Stamp(chain, plain, stamp.strict)


def label_of(module: nn.Module) -> str | None:
    """The name of the policy that a module was stamped with."""
    return module.__dict__.get(INFO, {}).get("label")


def outdated(module: nn.Module, policy: Policy) -> bool:
    """True for stamps that the backend wrote for another policy than ``policy``."""
    info: dict[str, Any] = module.__dict__.get(INFO, {})
    return bool(info.get("automatic")) and info["policy"] != digest(policy)


def check_agreement(module: nn.Module, policy: Policy) -> None:
    """Stamps win over ``options={"policy": ...}``; another policy there is an error.

    Raises:
        PolicyError: where ``module`` was stamped with another policy.
    """
    info = module.__dict__.get(INFO)
    if info is not None and info["policy"] != digest(policy):
        raise PolicyError(
            f"{policy.name}: layer {name_of(module)!r} is stamped with another policy; drop"
            ' options={"policy": ...} or call fp4.apply(model, policy) with this one'
        )
