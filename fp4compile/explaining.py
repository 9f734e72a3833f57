"""`fp4.explain`: what the passes do to each linear of a model, and why not."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from . import dynamo, stamping, watching
from .blocks import as_before, clean_name, linears, unwrap, weight_shape
from .choice import Choice
from .describing import describe, machine_of
from .kernels.errors import Fp4Error
from .passes import machines
from .passes.machines import Machine
from .policy import Policy
from .report import Report, Row, reports

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def explain(
    model: nn.Module,
    args: Sequence | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    policy: Policy | str | Path | Mapping | None = None,
    machine: str | None = None,
) -> Report:
    """One row for every linear of ``model``: scheme, rule, engine, saved bytes, status, reason.

    With example inputs the model is captured and rewritten, not compiled, and runs once in its
    original precision; its buffers, stamps and the random state are as before. Without, a model
    that was compiled with backend "fp4", whole or in parts, and has run gives the report of those
    graphs.
    ``args``: positional inputs; a tensor alone is the only one.
    ``policy``: a `Policy`, a file's path, a recipe's name or a dict; default: the model's stamps,
    else the recipe fp8-exact.
    ``machine``: times are predicted for this one, such as "B200"; default: the present GPU. It also
    stands for the present one where ``scheme: auto`` names none.

    Raises:
        Fp4Error: where there is neither an example input nor a compiled graph to report on, or
            ``model`` is no module.
        InputError: for a machine that the cost model does not know.
    """
    if not isinstance(model, nn.Module):
        _no_module(model)
    args = (args,) if isinstance(args, Tensor) else args
    inner, target = unwrap(model), machines.named(machine) if machine is not None else None
    if target is not None and not args and not kwargs and not _takes_nothing(inner):
        _no_inputs(inner, f"needs inputs to predict times on {target.name}")
    if not args and not kwargs and policy is None and target is None and _parts(inner):
        return _recorded(inner)
    if not args and not kwargs and not _takes_nothing(inner):
        if policy is not None:
            _no_inputs(inner, "has not run under this policy")
        return _recorded(inner)
    from .backend import as_policy

    resolved = as_policy(policy)
    report = Report(resolved.name)
    with _as_before(inner), watching.unwatched(), _eager_runs(inner) as eager:
        reasons = dynamo.break_reasons()
        backend = _Collector(report, resolved, policy is not None, target)
        _capture(inner, args, dict(kwargs or {}), backend)
        new = {r: n for r, n in dynamo.break_reasons().items() if n > reasons.get(r, 0)}
    _add_missing(report, inner, resolved, eager, next(iter(new), ""))
    return report


def _takes_nothing(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    various = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return all(p.default is not p.empty or p.kind in various for p in parameters)


def _no_module(model: object) -> NoReturn:
    if isinstance(model, type):
        name = model.__name__
        raise Fp4Error(f"explain: {name} is a class: give a module, such as {name}(...)")
    raise Fp4Error(f"explain: a torch module is needed, not {type(model).__name__}")


def _no_inputs(model: nn.Module, why: str) -> NoReturn:
    raise Fp4Error(
        f"explain: {type(model).__name__} {why}; give example inputs: fp4.explain(model, args=(x,))"
    )


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that were compiled by themselves: ``model``, or else some inside of it."""
    if reports.of(model) is not None:
        return {"": model}
    return {name: m for name, m in model.named_modules() if reports.of(m) is not None}


def recorded(model: nn.Module) -> Report | None:
    """The report of the graphs that have run, by the stamps of now; None where none has."""
    return _recorded(model) if _parts(model) else None


def _recorded(model: nn.Module) -> Report:
    """The report of the graphs that have run."""
    parts = _parts(model)
    if not parts:
        _no_inputs(model, "has no graph of its own under backend 'fp4' yet")
    found = [_recorded_whole(part) for part in parts.values()]
    complete = Report(found[0].policy, machine=found[0].machine)
    for name, report in zip(parts, found):
        names = [".".join(filter(None, (clean_name(name), row.fqn))) for row in report]
        complete.add([replace(row, fqn=fqn) for row, fqn in zip(report, names)])
    complete.graphs = sum(report.graphs for report in found)
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    order = {clean_name(n.removesuffix(".weight")): i for i, n in enumerate(parameters)}
    complete.rows.sort(key=lambda row: order.get(row.fqn, len(order)))
    complete.replace({})  # numbers the chains in the new order
    eager = {module for module in linears(model) if watching.eager_runs(module)}
    _add_missing(complete, model, None, eager, "")
    return complete


def _recorded_whole(model: nn.Module) -> Report:
    """The report of a model that was compiled by itself, without the layers in no graph."""
    report = reports.of(model)
    assert report is not None
    complete = Report(report.policy, list(report.rows), report.graphs, machine=report.machine)
    rows: dict[str, list[Row]] = {}
    numbers: dict[tuple, int] = {}  # chains by the part of the model that a graph served
    for module, (name, *_) in linears(model).items():
        stamp = str(stamping.stamp_of(module) or "")
        found, holder = reports.variant(model, name, stamp) or [], model
        if not found:
            found, holder = _served(model, module, name, stamp)
        for row in found:
            number = row.chain
            if number is not None:  # negative: the report's own are not
                number = numbers.setdefault((holder, number), -1 - len(numbers))
            rows.setdefault(name, []).append(replace(row, chain=number))
    complete.replace(rows)
    return complete


def _served(
    model: nn.Module, module: nn.Module, name: str, stamp: str
) -> tuple[list[Row], nn.Module]:
    """The row of a layer that runs in the graph of another one, and which part of ``model`` does.

    The two layers have equal stamps.
    """
    own = stamping.stamp_of(module)
    if own is None or watching.eager_runs(module):
        return [], model
    for prefix, holder in model.named_modules():
        if all(m is not module for m in holder.modules()):
            continue
        relative = name.removeprefix(clean_name(prefix)).removeprefix(".")
        row = reports.shared(model, (type(holder), relative, stamp))
        if row is not None and (holder is not module or watching.ran_alone(module)):
            rule = own.decision(row.chain is not None).rule
            return [replace(row, fqn=name, rule=rule)], holder
    return [], model


class _Collector:
    """A backend that rewrites a copy of each graph for the report and runs the graph as it was."""

    def __init__(
        self, report: Report, policy: Policy, explicit: bool, machine: Machine | None
    ) -> None:
        self.report, self.policy, self.explicit, self.machine = report, policy, explicit, machine
        self.codes: dict = {}  # functions and how many graphs they had

    def __call__(self, gm: GraphModule, inputs: list) -> Callable:
        from .kernels import ops  # noqa: F401 - defines torch.ops.fp4
        from .passes.rewrite import rewrite

        original = copy.deepcopy(gm)
        try:
            choice = Choice(gm, self.policy, self.explicit, True, self.machine)
            described = describe(choice, rewrite(gm, choice).rows, gm)
            self.report.policy = choice.label
            self.report.name_machine(machine_of(choice))
            self.report.add([each.row for each in described], torch.is_grad_enabled())
        except Fp4Error as error:
            raise dynamo.surface(error) from None
        if choice.places.frame is not None:
            code = choice.places.frame.code
            self.codes.setdefault(code, dynamo.graph_count(code))
        return original.forward


def _capture(model: nn.Module, args: Sequence, kwargs: dict, backend: _Collector) -> None:
    compiled = torch.compile(model, backend=backend)
    config = torch._dynamo.config
    limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
    with config.patch(limits):
        compiled(*args, **kwargs)
    dynamo.forget_graphs(backend.codes)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Put buffers, random states, stamps, hooks and attributes back as they were."""
    modules = list(model.modules())
    attributes = [dict(m.__dict__) for m in modules]
    hooks = [[dict(getattr(m, table)) for table in HOOKS] for m in modules]
    try:
        with as_before(model):
            yield
    finally:
        for module, before, tables in zip(modules, attributes, hooks):
            for key in [k for k in module.__dict__ if k not in before]:
                del module.__dict__[key]
            for key in [k for k in before if k.startswith(stamping.STAMP) or k == stamping.INFO]:
                module.__dict__[key] = before[key]
            for table, kept in zip(HOOKS, tables):
                for key in [k for k in getattr(module, table) if k not in kept]:
                    del getattr(module, table)[key]


@contextmanager
def _eager_runs(model: nn.Module) -> Iterator[set[nn.Module]]:
    """The linears of ``model`` that run outside of compiled graphs meanwhile."""
    seen: set[nn.Module] = set()

    def hook(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            seen.add(module)

    dynamo.eager_hook(hook)
    handles = [module.register_forward_pre_hook(hook) for module in linears(model)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _add_missing(
    report: Report, model: nn.Module, policy: Policy | None, eager: set, why: str
) -> None:
    """Rows for the linears that no captured graph holds."""
    known = {row.fqn for row in report.rows}
    resolution = policy.resolve(model).modules if policy is not None else {}
    for module, names in linears(model).items():
        if known.intersection(names):
            continue
        stamp = stamping.stamp_of(module) or resolution.get(module)
        decision = stamp.chain if stamp is not None else None
        report.rows.append(
            Row(
                fqn=names[0], kind=type(module).__name__,
                shape=weight_shape(module),
                scheme=str(decision.scheme) if decision else "",
                scheme_name=decision.scheme_name if decision else "",
                rule=decision.rule if decision else "", engine="", saved_bytes=0, original_bytes=0,
                status="not compiled", reason=_missing_reason(module in eager, why),
            )
        )  # fmt: skip


def _missing_reason(ran: bool, why: str) -> str:
    if not ran:
        return "no captured graph reached it"
    first = why.strip().splitlines()[0] if why.strip() else ""
    return "its frame ran without Dynamo" + (f": {first}" if first else "")
