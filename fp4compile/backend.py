"""The backend ``"fp4"`` of `torch.compile`: rewrite the captured graph, let Inductor lower it.

`options` holds this package's keys and passes every other key to Inductor:

| key | meaning |
|---|---|
| policy | a `Policy`, a policy file's path, a recipe's name, or a dict; default: fp8-exact |
| compiler | "inductor" (default), "aot_eager" or "eager": the rewritten graph without Inductor |
| cache_weights | True: quantize a weight once per change that PyTorch counts (`ready.py`) |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from . import dynamo, giving_up, policy_files, predicting, ready, reuse, sampling, watching
from .choice import Choice
from .describing import Described, describe, machine_of
from .kernels.errors import Fp4Error, PolicyError, PrecisionError
from .notices import warn
from .policy import Policy
from .report import reports
from .words import hint, shown, unknown

OPTIONS = ("policy", "compiler", "cache_weights")
PRODUCTS = {"linear", "addmm", "matmul", "mm"}
COMPILERS = ("inductor", "aot_eager", "eager")
# A chain's hidden gradient, factors and derivative included, counts more operations and reads than
# Inductor puts into one kernel by default (30 and 8): it would be kept in FP32 on the way.
ONE_KERNEL = {"realize_opcount_threshold": 64, "realize_acc_reads_threshold": 20}


giving_up.install()


def fp4(
    gm: GraphModule,
    example_inputs: list,
    *,
    options: Mapping | None = None,
    mode: str | None = None,
) -> Callable:
    """Backend function: called by Dynamo for every graph that it captures.

    Raises:
        PolicyError: for a policy or an option that cannot be used.
        PrecisionError: strict policies, where a layer that a rule names was not rewritten.
    """
    try:
        return _compile(gm, example_inputs, dict(options or {}), mode)
    except Fp4Error as error:
        raise dynamo.surface(error) from None


def _compile(gm: GraphModule, example_inputs: list, options: dict, mode: str | None) -> Callable:
    policy = options.pop("policy", None)
    compiler = options.pop("compiler", "inductor")
    if compiler not in COMPILERS:
        raise PolicyError(f"options: {unknown('compiler', compiler, COMPILERS)}")
    cache_weights = options.pop("cache_weights", False)
    if not isinstance(cache_weights, bool):
        raise PolicyError(f"options: cache_weights is True or False, not {shown(cache_weights)}")
    options = inductor_options(options, mode)
    resolved = as_policy(policy)
    choice, described = rewrite_frame(gm, resolved, explicit=policy is not None)

    def lower(gm: GraphModule, example_inputs: list) -> Callable:
        return compile_graph(gm, example_inputs, compiler, options, str(resolved))

    if cache_weights:
        compiled = ready.follow(gm, example_inputs, choice.models, lower)
    else:
        compiled = lower(gm, example_inputs)
    graphed = compiler == "inductor" and runs_as_cuda_graph(example_inputs, options)
    compiled = sampling.follow(compiled, graphed)
    compiled = reuse.follow(choice, described, compiled)
    if isinstance(policy, (str, os.PathLike)) and os.path.isfile(policy):
        compiled = policy_files.follow(resolved, compiled)
    return watching.own_frame(compiled) if choice.alone else compiled


def inductor_options(options: dict[str, Any], mode: str | None) -> dict[str, Any]:
    """Inductor's options by its own names, those of ``mode`` included.

    Raises:
        PolicyError: for a mode or an option that Inductor does not have.
    """
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode and mode not in modes:
        raise PolicyError(f"torch.compile: {unknown('mode', mode, modes)}")
    options = {key.replace("-", "_"): value for key, value in options.items()}
    for key in options:
        if key not in _inductor_keys():
            near = hint(key, [*OPTIONS, *_inductor_keys()])
            raise PolicyError(f"options: {key!r} is none of Inductor's nor of fp4's{near}")
    return {**(modes[mode] if mode else {}), **options}


def runs_as_cuda_graph(example_inputs: list, options: dict[str, Any]) -> bool:
    """Whether Inductor replays what it makes of a graph as a CUDA graph, where it can."""
    from torch._inductor import config

    asked = options.get("triton.cudagraphs", config.triton.cudagraphs)
    return bool(asked) and any(isinstance(t, torch.Tensor) and t.is_cuda for t in example_inputs)


@cache
def _inductor_keys() -> frozenset[str]:
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def as_policy(policy: Any) -> Policy:
    """A `Policy` from what a user may give: None, a `Policy`, a path, a recipe's name, a dict."""
    if policy is None:
        return Policy.default()
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Mapping):
        return Policy.from_dict(policy)
    if isinstance(policy, (str, os.PathLike)):
        return policy_files.named(os.fspath(policy))
    kind = type(policy).__name__
    raise PolicyError(
        "a policy is a path, a recipe's name, an fp4.Policy or a dict,"
        f" not {shown(policy)} ({kind})"
    )


def rewrite_frame(
    gm: GraphModule, policy: Policy, explicit: bool
) -> tuple[Choice, list[Described]]:
    """Rewrite one captured graph in place; record for `explain` what was done and what not."""
    from .kernels import ops  # noqa: F401 - defines torch.ops.fp4
    from .passes.rewrite import rewrite

    choice = Choice(gm, policy, explicit)
    described = describe(choice, rewrite(gm, choice).rows, gm)
    for each in described:
        if each.stamp.strict and each.row.refused:
            raise PrecisionError(
                f"strict policy {choice.label}: layer {each.title!r} ({each.row.rule}) was not"
                f" rewritten: {each.row.reason}"
            )
    choice.finish()
    _say_kept(choice)
    _report(choice, described)
    if not described:
        _say_no_module(choice, gm)
    for root in choice.places.roots:
        dynamo.make_room(choice.places.frame, root)
    return choice, described


def _say_kept(choice: Choice) -> None:
    """One line about the layers that `auto` left as they are."""
    kept = [asked.place.name if asked.place else asked.site.name for asked in choice.kept]
    if kept:
        warn(predicting.kept_message(choice.label, kept, len(choice.asked)), once=False)


def _report(choice: Choice, described: list[Described]) -> None:
    """Record the rows, each for its model; say once where nothing at all was rewritten."""
    by_model: dict[nn.Module | None, list[Described]] = {}
    for each in described:
        by_model.setdefault(each.model, []).append(each)
    found = []
    for model in by_model or choice.models:
        mine = by_model.get(model, [])
        found.append(
            reports.record(
                model, choice.label_of(model), [each.row for each in mine],
                [str(each.stamp) for each in mine], [each.shared for each in mine],
                machine_of(choice),
            )
        )  # fmt: skip
    # A part of a stamped model may well be all original.
    part = described and all(each.part and not each.row.refused for each in described)
    told = part or choice.kept or any(r.rewritten or r.noticed for r in found)
    nothing = choice.complete and not told
    for warning in choice.own_warnings if nothing else choice.warnings:
        warn(warning)
    refused = [each for each in described if each.row.refused and not each.stamp.strict]
    if refused and not nothing:
        warn(_refused_message(choice.label, refused))
    if nothing and found:
        found[0].noticed = True
        warn(f"fp4: {found[0].nothing()}", once=False)


def _say_no_module(choice: Choice, gm: GraphModule) -> None:
    """One line about a compiled function whose products read no parameter of a module."""
    from .passes.nodes import op

    entry, frame = dynamo.entry(), choice.places.frame
    if entry is None or frame is None or entry.code is not frame.code:
        return  # a part of something else
    if choice.models or choice.places.breaks or isinstance(entry.model, nn.Module):
        return
    if any(op(node) in PRODUCTS for node in gm.graph.nodes):
        warn(
            f"policy {choice.label}: nothing was rewritten in {frame.code.co_name!r}: it multiplies"
            " by no parameter of a module"
        )


def _refused_message(label: str, refused: list[Described]) -> str:
    """One line about layers that the policy asks to quantize and that were not."""
    first, more = refused[0], len(refused) - 1
    others = f" and {more} more" if more else ""
    return (
        f"policy {label}: {first.title!r}{others} stay in their original precision, although the"
        f" policy names them: {first.row.reason}; see fp4.explain"
    )


def compile_graph(
    gm: GraphModule, example_inputs: list, compiler: str, options: dict[str, Any], policy: str
) -> Callable:
    """Hand the rewritten graph on to ``compiler``."""
    if compiler == "eager":
        return gm.forward
    if compiler == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, example_inputs)
    from torch._inductor.compile_fx import compile_fx

    from .kernels.engines import prepare
    from .kernels.inductor import register

    register()
    for device in {t.device for t in example_inputs if isinstance(t, torch.Tensor)}:
        prepare(device)
    try:
        options = {**(ONE_KERNEL if has_chains(gm) else {}), **options}
        compiled: Any = compile_fx(gm, example_inputs, config_patches=patches(options, policy))
        return compiled
    except Exception as exc:
        _say_missing_compiler(exc)
        raise


def has_chains(gm: GraphModule) -> bool:
    """Whether a chain of the graph, or of a graph within it, was rewritten."""
    from .passes.nodes import graph_modules

    chains = torch.ops.fp4.linear_act_linear.default, torch.ops.fp4.gated_linear.default
    return any(node.target in chains for _, g in graph_modules(gm) for node in g.graph.nodes)


def patches(options: dict[str, Any], policy: str) -> dict[str, Any]:
    """Inductor's options with this package's cache key and its pass over inference graphs."""
    from torch._inductor import config

    from .cache_key import KeyedPass

    joint, post = "joint_custom_pre_pass", "post_grad_custom_pre_pass"
    users = {key: options.get(key, getattr(config, key)) for key in (joint, post)}
    return {
        **options,
        joint: KeyedPass(policy, None, users[joint]),
        post: KeyedPass(policy, merge_equal_nodes, users[post]),
    }


def merge_equal_nodes(graph: Graph) -> None:
    """An input quantized once serves every linear that reads it, in `no_grad` graphs as well."""
    from .passes.cse import merge_equal

    if graph.owning_module is not None:
        merge_equal(graph.owning_module)


def _say_missing_compiler(exc: Exception) -> None:
    """One line instead of Inductor's page, where the machine has no C++ compiler."""
    if "InvalidCxxCompiler" in type(exc).__name__ or "InvalidCxxCompiler" in str(exc):
        raise Fp4Error(
            "Inductor found no C++ compiler for CPU code: install g++ (or set CXX), or use"
            ' options={"compiler": "aot_eager"}'
        ) from None


