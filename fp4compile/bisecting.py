"""Which layer, and which of its GEMMs, moves the loss: `bisect`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import dynamo
from .blocks import as_before, linears, unwrap
from .kernels.errors import InputError, PrecisionWarning
from .kernels.formats import Scheme
from .policy import Policy
from .stamp import Decision, Stamp
from .stamping import INFO, STAMP
from .tables import table, terminal_width


@dataclass(frozen=True)
class Effect:
    """One layer alone in low precision, everything else as it was.

    ``loss``: what its forward GEMM adds to the loss. ``dgrad``, ``wgrad``: the relative error of
    all gradients that the layer's two backward GEMMs make, ||g - g0|| / ||g0||; None where the
    scheme leaves the GEMM in the original precision.
    """

    layer: str
    scheme: str
    loss: float | None
    dgrad: float | None
    wgrad: float | None


@dataclass
class Bisection:
    """Loss in the original precision, with every layer quantized, and each layer's part."""

    original: float
    quantized: float
    effects: list[Effect] = field(default_factory=list)

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        change = self.quantized - self.original
        heads = ("layer", "scheme", "loss change", "dgrad error", "wgrad error")
        rows = [
            (e.layer, e.scheme, _text(e.loss, "+.2e"), _text(e.dgrad, ".1%"), _text(e.wgrad, ".1%"))
            for e in self.effects
        ]
        lines = table(heads, rows, terminal_width(), ("layer", "scheme"))
        parts = sum(e.loss or 0.0 for e in self.effects)
        head = (
            f"loss {self.original:.6f} in the original precision, {self.quantized:.6f} quantized:"
            f" {change:+.2e}",
            f"layers one at a time add up to {parts:+.2e}",
        )
        return "\n".join([*head, "", *lines])


def _text(value: float | None, form: str) -> str:
    return "original" if value is None else format(value, form)


def bisect(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    policy: Policy | str | Path | Mapping | None = None,
    seed: int = 0,
) -> Bisection:
    """Quantize one layer and one GEMM at a time; say what each does to the loss and gradients.

    ``loss(model)`` returns a scalar from fixed data; it is called with a compiled ``model`` under
    ``torch.manual_seed(seed)``, 2 + 3 times the number of quantized linears. Rows come in the order
    of their effect on the loss. Nothing of the model is changed, gradients, buffers and stamps
    included, nor a random state;
    graphs run eagerly (``compiler: eager``), so that none of it depends on Inductor.

    Raises:
        PolicyError: for a policy that cannot be used.
        InputError: where ``loss`` gives no finite scalar, or the policy quantizes no linear.
    """
    from .backend import as_policy

    model = unwrap(model)
    resolved = as_policy(policy).resolve(model)
    names = {module: names[0] for module, names in linears(model).items()}
    chosen = {m: s for m, s in resolved.modules.items() if not s.original}
    if not chosen:
        raise InputError("fp4.bisect: the policy quantizes none of the model's linears")
    dynamo.allow_graphs(3 * len(chosen) + 4)
    run: Any = torch.compile(model, backend="fp4", options={"compiler": "eager"})
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("fp4.bisect: no parameter of the model requires a gradient")

    def evaluate(stamps: Mapping[nn.Module, Stamp]) -> tuple[float, list[Tensor | None]]:
        with _stamped({m: stamps.get(m) for m in names}), warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            torch.manual_seed(seed)
            value = loss(run)
            if value.numel() != 1 or not value.isfinite().all():
                raise InputError("fp4.bisect: loss(model) must return one finite number")
            grads = torch.autograd.grad(value, parameters, allow_unused=True)
        return float(value.detach()), list(grads)

    with as_before(model):
        return _bisected(evaluate, chosen, names)


def _bisected(
    evaluate: Callable[[Mapping[nn.Module, Stamp]], tuple[float, list[Tensor | None]]],
    chosen: Mapping[nn.Module, Stamp], names: Mapping[nn.Module, str],
) -> Bisection:  # fmt: skip
    start, _ = evaluate({})
    whole, _ = evaluate(chosen)
    result = Bisection(start, whole)
    for module, stamp in chosen.items():
        forward, exact = evaluate({module: _only(stamp)})
        errors: dict[str, float | None] = {}
        for gemm in ("dgrad", "wgrad"):
            quantized = any(getattr(d.scheme, gemm) for d in (stamp.chain, stamp.plain))
            errors[gemm] = (
                _error(evaluate({module: _only(stamp, gemm)})[1], exact) if quantized else None
            )
        names_of = dict.fromkeys(d.scheme_name for d in (stamp.chain, stamp.plain))
        scheme = " or ".join(name for name in names_of if name != "original")
        result.effects.append(Effect(names[module], scheme, forward - start, **errors))
    result.effects.sort(key=lambda e: -abs(e.loss or 0.0))
    return result


def _only(stamp: Stamp, gemm: str = "") -> Stamp:
    """``stamp`` with its forward GEMM, and one backward GEMM, alone."""

    def keep(decision: Decision) -> Decision:
        scheme = decision.scheme
        kept = {gemm: getattr(scheme, gemm)} if gemm else {}
        return Decision(Scheme(fprop=scheme.fprop, **kept), decision.scheme_name, decision.rule)

    return Stamp(keep(stamp.chain), keep(stamp.plain))


def _error(grads: list[Tensor | None], exact: list[Tensor | None]) -> float:
    off = norm = 0.0
    for g, e in zip(grads, exact):
        if g is not None and e is not None:
            off += float((g.float() - e.float()).square().sum())
            norm += float(e.float().square().sum())
    return (off / norm) ** 0.5 if norm else 0.0


@contextmanager
def _stamped(stamps: Mapping[nn.Module, Stamp | None]) -> Iterator[None]:
    """Stamps for a while; None is the original precision."""
    plain = Decision(Scheme(), "original", "bisect")
    original = Stamp(plain, plain)
    before: dict[nn.Module, dict[str, Any]] = {}
    try:
        for module, stamp in stamps.items():
            before[module] = {k: v for k, v in module.__dict__.items() if k in (STAMP, INFO)}
            module.__dict__.pop(INFO, None)
            setattr(module, STAMP, str(replace(stamp or original, strict=False)))
        yield
    finally:
        for module, attributes in before.items():
            for key in (STAMP, INFO):
                module.__dict__.pop(key, None)
            module.__dict__.update(attributes)
