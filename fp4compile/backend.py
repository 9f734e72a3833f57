"""The backend ``"fp4"`` of `torch.compile`: rewrite the captured graph, let Inductor lower it.

`options` holds this package's keys and passes every other key to Inductor:

| key | meaning |
|---|---|
| policy | a `Policy`, a policy file's path, or a dict; default: recipe fp8-exact |
| compiler | "inductor" (default), "aot_eager" or "eager": the rewritten graph without Inductor |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch.fx import Graph, GraphModule

from . import dynamo
from .kernels.errors import Fp4Error, PolicyError, PrecisionError
from .notices import warn
from .policy import Policy
from .report import Report, reports

COMPILERS = ("inductor", "aot_eager", "eager")


def fp4(
    gm: GraphModule, example_inputs: list, *, options: Mapping | None = None, mode: str | None = None
) -> Callable:
    """Backend function: called by Dynamo for every graph that it captures.

    Raises:
        PolicyError: for a policy that cannot be used.
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
        raise PolicyError(f"options['compiler']={compiler!r} is none of {', '.join(COMPILERS)}")
    if mode:
        options = {**_mode(mode), **options}
    resolved = as_policy(policy)
    rewrite_frame(gm, resolved, explicit=policy is not None)
    return compile_graph(gm, example_inputs, compiler, options, str(resolved))


def as_policy(policy: Any) -> Policy:
    """A `Policy` from what a user may give: None, a `Policy`, a path, or a dict."""
    if policy is None:
        return Policy.default()
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Mapping):
        return Policy.from_dict(policy)
    if isinstance(policy, (str, os.PathLike)):
        path = os.fspath(policy)
        stamp = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
        return _load(path, stamp)
    raise PolicyError(
        f"options['policy'] is a {type(policy).__name__}; give a path, a fp4.Policy or a dict"
    )


@lru_cache(maxsize=32)
def _load(path: str, stamp: int) -> Policy:
    return Policy.load(path)


def _mode(mode: str) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def rewrite_frame(gm: GraphModule, policy: Policy, explicit: bool) -> Report:
    """Rewrite one captured graph in place; record, for `explain`, what was done and what was not."""
    from .choice import Choice
    from .kernels import ops  # noqa: F401 - defines torch.ops.fp4
    from .passes.rewrite import rewrite

    choice = Choice(gm, policy, explicit)
    rows = rewrite(gm, choice).rows
    choice.finish(rows)
    described = choice.describe(rows)
    report = reports.record(choice.root, policy.name, described)
    for row in choice.strictly_refused(described):
        raise PrecisionError(
            f"strict policy {policy.name}: layer {row.fqn!r} ({row.rule}) was not rewritten:"
            f" {row.reason}"
        )
    if choice.complete and not report.rewritten and not report.noticed:
        report.noticed = True
        warn(f"fp4: {report.nothing()}")
    return report


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

    from .kernels.inductor import register

    register()
    try:
        return compile_fx(gm, example_inputs, config_patches=patches(options, policy))
    except Exception as exc:
        _say_missing_compiler(exc)
        raise


def patches(options: dict[str, Any], policy: str) -> dict[str, Any]:
    """Inductor's options with this package's cache key and its pass over inference graphs."""
    from .cache_key import KeyedPass

    out = {key.replace("-", "_"): value for key, value in options.items()}
    joint, post = "joint_custom_pre_pass", "post_grad_custom_pre_pass"
    out[joint] = KeyedPass(policy, None, out.get(joint))
    out[post] = KeyedPass(policy, merge_equal_nodes, out.get(post))
    return out


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


