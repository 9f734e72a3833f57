"""Predicted times of the layers of a graph (`passes/cost.py`): for `explain`, and for `auto`.

A chain's kernels are split among its layers: the activation belongs to the layer whose operand it
makes, its derivative to the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from .kernels.errors import PolicyError
from .kernels.formats import Scheme
from .passes import cost, machines
from .passes.chains import Chain
from .passes.machines import Machine
from .passes.nodes import is_tensor, value
from .passes.sites import Site
from .stamp import Decision

Times = tuple[float, float]  # milliseconds as quantized, and in the original precision


def hint(size: int | torch.SymInt) -> int:
    """A size as a number, from the example input where it is dynamic; reading it guards nothing."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return int(known) if known is not None else 1


def tokens(site: Site) -> int:
    """Rows of a layer's input."""
    return math.prod(hint(d) for d in value(site.x).shape[: -site.axes[1]])


def dtype_of(site: Site) -> torch.dtype:
    """The dtype of a layer's output; its input's inside a larger operation."""
    return value(site.out if is_tensor(site.out) else site.x).dtype


def present(device: torch.device) -> Machine | None:
    """The machine that ``device`` is; None for CPUs and for GPUs that the cost model knows not."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return machines.of_device(torch.cuda.get_device_name(device))


@cache
def _times(
    schemes: tuple[Scheme, ...], machine: Machine, sizes: tuple[int, ...], high: int, forward: bool
) -> tuple[float, ...]:
    """Milliseconds of each layer of a chain (m, k, n, out), or of one layer (m, k, n)."""
    m, k, n, *out = sizes
    if out:
        steps = cost.chain(schemes, machine, m, k, n, out[0], high)
    else:
        steps = cost.linear(schemes[0], machine, m, k, n, high)
    found = [0.0] * len(schemes)
    for step in steps:
        if not (forward and step.backward):
            found[step.layer] += 1e3 * step.seconds(machine)
    return tuple(found)


def layer_times(site: Site, scheme: Scheme, machine: Machine, forward: bool = False) -> Times:
    """A layer by itself; ``forward``: without its backward pass."""
    sizes = tokens(site), hint(site.in_features), hint(site.out_features)
    rest = machine, sizes, dtype_of(site).itemsize, forward
    return _times((scheme,), *rest)[0], _times((Scheme(),), *rest)[0]


def chain_times(
    sites: Sequence[Site], schemes: Sequence[Scheme], machine: Machine, forward: bool = False
) -> list[Times]:
    """The layers of a fused chain, in the order of ``sites``.

    Where one linear computes gate and up, it stands for both.
    """
    lead, down = sites[0], sites[-1]
    n = hint(down.in_features)
    both = len(sites) == 2 and hint(lead.out_features) == 2 * n
    schemes = (schemes[0], *schemes) if both else tuple(schemes)
    sizes = tokens(lead), hint(lead.in_features), n, hint(down.out_features)
    rest = machine, sizes, dtype_of(down).itemsize, forward
    now, before = (_times(s, *rest) for s in (tuple(schemes), (Scheme(),) * len(schemes)))
    each = list(zip(now, before))
    if both:
        each[:2] = [(now[0] + now[1], before[0] + before[1])]
    return each


# ---- scheme: auto -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether ``auto`` quantizes a layer or a chain, and why."""

    gains: bool
    text: str


def machine_for(decision: Decision, device: torch.device, asked: Machine | None) -> Machine:
    """The machine that an ``auto`` decision is for: the policy's, ``asked``, or the present GPU.

    Raises:
        PolicyError: where there is none, or the model does not know it.
    """
    if decision.auto:
        return machines.named(decision.auto)
    found = asked or present(device)
    if found is None:
        known = ", ".join(machines.MACHINES)
        gpu = device.type == "cuda" and torch.cuda.is_available()
        here = torch.cuda.get_device_name(device) if gpu else "no GPU"
        raise PolicyError(
            f"scheme: auto ({decision.rule}): the cost model does not know this machine ({here});"
            f" name one in the policy, such as `machine: H200` (known: {known})"
        )
    return found


def judge(times: Sequence[Times], machine: Machine) -> Verdict:
    """Quantize where it is predicted to be faster."""
    now, before = (sum(part) for part in zip(*times))
    gains = now < before
    ratio = f"{now / before:.2f} x its time on {machine.name}" if before else machine.name
    text = f"auto: {ratio} ({short(now)} against {short(before)} ms)"
    return Verdict(gains, text if gains else f"{text}, kept")


def short(ms: float) -> str:
    """Milliseconds in three digits: 12.3, 0.123, 0.0123."""
    return f"{ms:.{max(0, 2 - math.floor(math.log10(ms)))}f}" if ms > 0 else "0"


def resolved(decision: Decision, verdict: Verdict) -> Decision:
    """What ``auto`` came to, with the reason in its rule."""
    rule = f"{decision.rule}; {verdict.text}"
    if verdict.gains:
        return replace(decision, scheme_name="low", rule=rule, auto=None)
    return Decision(Scheme(), "original", rule)


def chain_of(chains: Sequence[Chain], site: Site) -> Chain | None:
    """The first unblocked chain that a site is in."""
    holds = (c for c in chains if c.blocked is None and any(s.node is site.node for s in c.sites))
    return next(holds, None)


def device_of(site: Site) -> torch.device:
    """Where a layer runs."""
    return value(site.x).device


def kept_message(label: str, kept: Sequence[str], layers: int) -> str:
    """The notice of layers that ``auto`` left in their original precision."""
    return (
        f"policy {label}: auto keeps {len(kept)} of {layers} linear layers in their original"
        f" precision, predicted to be faster: {', '.join(dict.fromkeys(kept))}; see fp4.explain"
    )
