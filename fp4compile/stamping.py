"""Stamps: each linear of a model carries its scheme, so that any way of compiling it agrees.

Dynamo compiles a block once and runs the graph for every block of its class, and below a graph
break it sees submodules without their names. A stamp (``module.fp4_scheme``, a text) is guarded by
the compiled graph: equal stamps share a graph, a changed stamp compiles again.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from . import dynamo
from .kernels.errors import PolicyError, PrecisionError
from .notices import warn
from .policy import Policy, Resolution
from .stamp import Stamp

INFO = "fp4_info"
STAMP = dynamo.STAMP


def apply(model: nn.Module, policy: Policy | str, step: int | None = None) -> dict[str, str]:
    """Stamp every linear of ``model`` with its scheme under ``policy`` at training step ``step``.

    Needed before compiling block by block, under FSDP2 and for phases; on a running compiled model
    it takes effect at the next call (one compilation per new state, none on return). Returns the
    stamps by layer name. ``policy`` is a `Policy` or a file's path.

    Raises:
        PolicyError: for a policy that cannot be used, or that names no layer when strict.
        PrecisionError: where this version of torch cannot guard stamps.
    """
    dynamo.self_test()
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    resolution = policy.resolve(model, step)
    for warning in resolution.warnings:
        warn(warning)
    stamp_modules(model, resolution, digest(policy))
    states = len({str(s) for s in resolution.values()}) * (1 + len(policy.phases))
    dynamo.raise_recompile_limit(2 * states)
    return {name: str(stamp) for name, stamp in resolution.items()}


def digest(policy: Policy) -> str:
    """A short text that is equal for policies that decide alike."""
    return hashlib.sha256(str(policy).encode()).hexdigest()[:16]


def stamp_modules(model: nn.Module, resolution: Resolution, policy: str) -> None:
    """Write stamps, what `explain` says about them, and the watch on each linear."""
    names: dict[Stamp, str] = {}
    by_module = _names(model)
    for module, stamp in resolution.modules.items():
        setattr(module, STAMP, names.setdefault(stamp, str(stamp)))
        info = {
            "policy": policy,
            "name": by_module.get(module, ""),
            "strict": stamp.strict,
            "rules": [(d.scheme_name, d.rule) for d in (stamp.chain, stamp.plain)],
        }
        module.__dict__[INFO] = info
        watch(module, stamp)


def _names(model: nn.Module) -> dict[nn.Module, str]:
    from .blocks import linears

    return {module: names[0] for module, names in linears(model).items()}


def stamp_of(module: nn.Module) -> Stamp | None:
    """The stamp that a module carries, with the rules that `apply` wrote beside it."""
    text = module.__dict__.get(STAMP)
    if text is None:
        return None
    stamp = Stamp.parse(text)
    rules = module.__dict__.get(INFO, {}).get("rules")
    if rules is None:
        return stamp
    decisions = [
        type(d)(d.scheme, name, rule)
        for d, (name, rule) in zip((stamp.chain, stamp.plain), rules)
    ]
    return Stamp(*decisions, stamp.strict)


def check_agreement(module: nn.Module, policy: Policy) -> None:
    """Stamps win over ``options={"policy": ...}``; another policy there is an error.

    Raises:
        PolicyError: where ``module`` was stamped with another policy.
    """
    info = module.__dict__.get(INFO)
    if info is not None and info["policy"] != digest(policy):
        raise PolicyError(
            f'{policy.name}: layer {info["name"]!r} is stamped with another policy; drop'
            ' options={"policy": ...} or call fp4.apply(model, policy) with this one'
        )


# A watch sees a layer run outside of every compiled graph ----------------------------------------


def watch(module: nn.Module, stamp: Stamp | None = None) -> None:
    """Notice when ``module`` runs eagerly although ``stamp`` names it. Compiled calls cost nothing."""
    if stamp is not None and stamp.original:
        module.__dict__.setdefault(INFO, {})["watch"] = "off"
        return
    info = module.__dict__.setdefault(INFO, {})
    info["watch"] = "on" if stamp is None or not stamp.plain.scheme.original else "chain"
    if _notice not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_notice)


def seen_in_graph(module: nn.Module, rewritten: bool) -> None:
    """Record that a compiled graph holds ``module``: what it does there is known from now on."""
    info = module.__dict__.setdefault(INFO, {})
    if info.get("watch") == "chain":
        info["watch"] = "on" if rewritten else "off"


def _notice(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    info = module.__dict__.get(INFO, {})
    state = info.get("watch", "off")
    if state == "off":
        return
    info["eager"] = info.get("eager", 0) + 1
    name, doubt = info.get("name") or type(module).__name__, ""
    if state == "chain":
        doubt = " (unless it is in no chain)"
    message = (
        f"layer {name!r} ran outside every compiled graph, in its original precision, although"
        f" rule {info['rules'][0][1]!r} names it{doubt}: Dynamo skipped its frame or hit its"
        " recompile limit; see fp4.explain"
    )
    if info.get("strict"):
        raise PrecisionError(message)
    if info["eager"] == 1:
        warn(message)
