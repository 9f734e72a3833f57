"""Which layers need more precision: errors measured in high precision, and a policy from them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import watching
from .blocks import as_before, linears, unwrap
from .kernels import ops as _ops  # noqa: F401 - defines torch.ops.fp4
from .kernels import reference
from .kernels.errors import Fp4Error, InputError, PrecisionWarning
from .kernels.formats import Operand, Scheme, TensorFormat
from .policy import Policy
from .tables import table, terminal_width

SEED = 0


@dataclass
class Figures:
    """One layer under its scheme, means over the batches; errors are relative, ||a - b|| / ||b||.

    ``x``, ``w``, ``g``: of the forward activation, the weight and the output's gradient (as DGRAD
    reads it) by their quantization; ``y``, ``dx``, ``dw``: of the three GEMMs' results. ``zeros``:
    the share of x that becomes 0 without being it. ``kurtosis`` of x: 3 for a Gaussian, above for
    outliers. ``loss``: the loss change of first order, sum(dL/dy * (y_q - y)). ``spread``: its
    standard deviation if the errors of single outputs were independent.
    """

    layer: str
    parameters: int
    scheme: str
    x: float = 0.0
    w: float = 0.0
    g: float = 0.0
    y: float = 0.0
    dx: float = 0.0
    dw: float = 0.0
    zeros: float = 0.0
    kurtosis: float = 0.0
    loss: float = 0.0
    spread: float = 0.0
    kept: bool = False

    @property
    def impact(self) -> float:
        """What the ranking goes by: the larger of |loss| and spread, a parameter."""
        return max(abs(self.loss), self.spread) / self.parameters


ERRORS = ("x", "w", "g", "y", "dx", "dw")


@dataclass
class Calibration:
    """Figures by layer, the worst first, and the policy that keeps the worst in more precision."""

    recipe: str
    budget: float
    higher: str
    batches: int
    figures: list[Figures] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The policy file, figures as comments."""
        lines = [
            f"# Measured on {self.batches} batches: the layers that gain most a parameter, with at",
            f"# most {self.budget:.0%} of the quantized parameters, run in {self.higher}.",
            "version: 1",
            f"recipe: {self.recipe}",
            "layers:",
        ]
        for f in self.figures:
            if f.kept:
                errors = f"y {f.y:.1%}, dx {f.dx:.1%}, dw {f.dw:.1%}"
                lines += [
                    f"  - {{match: {json.dumps(f.layer)}, scheme: {self.higher}}}",
                    f"    # {errors}; loss {f.loss:+.1e} +- {f.spread:.1e}",
                ]
        lines.append("  - {chain: mlp, scheme: low}  # instead of the recipe's choice of blocks")
        return "\n".join(lines) + "\n"

    @property
    def policy(self) -> Policy:
        """The policy of `text`."""
        return Policy.parse(self.text, name=f"{self.recipe}, calibrated")

    def save(self, path: str | Path) -> None:
        """Write `text` to ``path``."""
        Path(path).write_text(self.text)

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        heads = ("layer", "kept", *ERRORS, "zeros", "kurt.", "loss", "spread")
        rows = [
            (
                f.layer, "yes" if f.kept else "", *(f"{getattr(f, n):.1%}" for n in ERRORS),
                f"{f.zeros:.1%}", f"{f.kurtosis:.0f}", f"{f.loss:+.0e}", f"{f.spread:.0e}",
            )
            for f in self.figures
        ]  # fmt: skip
        return "\n".join(table(heads, rows, terminal_width(), ("layer",)))

    def plot(self, path: str | Path) -> None:
        """A heat map, layers x operands and results, to a PNG; needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        values = [[100 * getattr(f, n) for n in ERRORS] for f in self.figures]
        figure, axes = plt.subplots(
            figsize=(6.4, 1.2 + 0.24 * len(values)), layout="constrained"
        )
        image = axes.imshow(values, aspect="auto", cmap="viridis")
        axes.set_xticks(range(len(ERRORS)), ERRORS)
        axes.set_yticks(
            range(len(values)), [f.layer + (" *" if f.kept else "") for f in self.figures]
        )
        axes.tick_params(labelsize=8)
        axes.set_title(
            f"Relative error, {self.recipe}, worst layers first (* in {self.higher})", fontsize=9
        )
        figure.colorbar(image, label="%")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: str = "fp8-exact",
    budget: float | str = "15%",
    higher: str = "mxfp8",
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    progress: bool = False,
) -> Calibration:
    """Measure each quantized linear in a high-precision run, and write a policy from it.

    One forward and backward pass a batch; each layer is quantized alone, in its own hook, so that
    no more than one layer's tensors are kept beside autograd's. The layers with the largest effect
    on the loss a parameter get the scheme ``higher`` of the recipe ("original" always exists) until
    they hold ``budget`` of the quantized parameters, a fraction or "15%".

    ``loss(model, batch)`` returns the scalar loss; by default the model is called with the batch (a
    mapping as keywords, a tuple as arguments) and returns it, or an object with ``.loss``.
    The model's gradients, buffers, stamps and random state are as before.

    Raises:
        PolicyError: for a recipe, scheme or budget that cannot be used.
        InputError: without batches, for a loss that is no finite scalar, for a layer that gets no
            rows or values that are not finite, and where no parameter requires a gradient.
    """
    model, share = unwrap(model), _fraction(budget)
    batches = list(batches)
    if not batches:
        raise InputError("fp4.calibrate: no batches; give at least one")
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("fp4.calibrate: no parameter of the model requires a gradient")
    policy = Policy.from_dict(
        {"version": 1, "recipe": recipe, "layers": [{"chain": "mlp", "scheme": "low"}]}
    )
    _ = Policy.from_dict(
        {"version": 1, "recipe": recipe, "layers": [{"match": "*", "scheme": higher}]}
    )
    with as_before(model):
        schemes = _schemes(model, batches[0], policy, loss)
    result = Calibration(recipe, share, higher, len(batches))
    names = {module: names[0] for module, names in linears(model).items()}
    chosen = {m: (names[m], schemes[names[m]]) for m in names if names[m] in schemes}
    sums = {m: Figures(n, m.get_parameter("weight").numel(), s) for m, (n, s) in chosen.items()}
    hooks = [m.register_forward_hook(_measure(f)) for m, f in sums.items()]
    try:
        with watching.unwatched(), as_before(model):  # in high precision on purpose
            for batch in _track(batches, progress):
                _backward(model, batch, loss)
    finally:
        for hook in hooks:
            hook.remove()
    for f in sums.values():
        for entry in fields(f)[3:-1]:
            setattr(f, entry.name, getattr(f, entry.name) / len(batches))
    result.figures = sorted(sums.values(), key=lambda f: -f.impact)
    room = share * sum(f.parameters for f in result.figures)
    for f in result.figures:
        f.kept = f.parameters <= room
        room -= f.parameters * f.kept
    return result


def _fraction(budget: float | str) -> float:
    text = str(budget)
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise InputError(f"fp4.calibrate: budget {budget!r}: a share such as 0.15 or '15%'")
    return value


def _track(batches: list, progress: bool) -> Iterable[Any]:
    if not progress:
        return batches
    from rich.progress import track

    return track(batches, description="calibrating")


def _schemes(model: nn.Module, batch: Any, policy: Policy, loss: Any) -> dict[str, str]:
    """Layers that the passes would rewrite, with their schemes; found by a capture of one batch."""
    seen: dict[str, str] = {}
    from .report import reports

    before = reports.of(model)
    options: dict[str, Any] = {"policy": policy, "compiler": "eager"}
    run = torch.compile(model, backend="fp4", options=options)
    with watching.unwatched(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        _loss(run, batch, loss)
    report = reports.of(model)
    if report is None or report is before and not report.rows:
        raise Fp4Error("fp4.calibrate: the model was not captured; see fp4.explain")
    for row in report.rewritten:
        seen[row.fqn] = row.scheme
    return seen


def _loss(run: Any, batch: Any, loss: Callable | None) -> Tensor:
    if loss is not None:
        value = loss(run, batch)
    elif isinstance(batch, Mapping):
        value = run(**batch)
    else:
        value = run(*batch) if isinstance(batch, (tuple, list)) else run(batch)
    value = getattr(value, "loss", value)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.isfinite().all():
        raise InputError("fp4.calibrate: a batch must give one finite loss; pass loss=")
    return value


def _backward(model: nn.Module, batch: Any, loss: Callable | None) -> None:
    """Gradients flow to the outputs of the layers; none is stored on a parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(), torch.enable_grad():
        value = _loss(model, batch, loss)
        torch.autograd.grad(value, parameters, allow_unused=True)


def _measure(figures: Figures) -> Callable:
    """A forward hook that measures when the gradient of the layer's output is there."""

    def hook(module: nn.Module, args: tuple, y: Tensor) -> None:
        x = args[0].detach()
        if y.requires_grad:
            y.register_hook(lambda g: _add(figures, module, x, g))

    return hook


@torch.no_grad()
def _add(figures: Figures, module: nn.Module, x: Tensor, g: Tensor) -> None:
    """Add what one batch says of a layer."""
    scheme = Scheme.parse(figures.scheme)
    w = module.get_parameter("weight").detach()
    w = w if isinstance(module, nn.Linear) else w.t()  # Conv1D
    x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    if not x.shape[0]:
        raise _cannot(figures, "a batch gives it no rows; leave that out")
    for name, t in (("its input", x), ("its weight", w), ("its output's gradient", g)):
        if not t.isfinite().all():
            raise _cannot(figures, f"{name} holds NaN or inf in a batch; leave that out")
    dtype = x.dtype
    with torch.enable_grad():
        leaves = x.clone().requires_grad_(), w.to(dtype).clone().requires_grad_()
        y_q = torch.ops.fp4.linear(*leaves, None, figures.scheme, dtype)
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            dx_q, dw_q = torch.autograd.grad(y_q, leaves, g.to(dtype))
    xf, wf, gf = x.float(), w.float(), g.float()
    delta = y_q.detach().float() - xf @ wf.t()
    effect = gf * delta
    figures.loss += float(effect.sum())
    figures.spread += float(effect.norm())
    figures.y += _relative(delta, xf @ wf.t())
    figures.dx += _relative(dx_q.float() - gf @ wf, gf @ wf)
    figures.dw += _relative(dw_q.float() - gf.t() @ xf, gf.t() @ xf)
    if scheme.fprop is not None:
        x_q = _rounded(scheme.fprop[0], xf)
        figures.x += _relative(x_q - xf, xf)
        figures.zeros += float(((x_q == 0) & (xf != 0)).float().mean())
        w_q = _rounded(scheme.fprop[1], wf)
        figures.w += _relative(w_q - wf, wf)
    if scheme.dgrad is not None:
        figures.g += _relative(_rounded(scheme.dgrad[0], gf) - gf, gf)
    centred = xf - xf.mean()
    figures.kurtosis += float(centred.pow(4).mean() / centred.pow(2).mean().square())


def _cannot(figures: Figures, why: str) -> InputError:
    return InputError(f"fp4.calibrate: layer {figures.layer}: {why}")


def _relative(off: Tensor, exact: Tensor) -> float:
    norm = float(exact.norm())
    return float(off.norm()) / norm if norm else 0.0


def _rounded(operand: Operand, x: Tensor) -> Tensor:
    fmt: TensorFormat | None = operand.format
    assert fmt is not None
    seed = torch.tensor(SEED, device=x.device) if fmt.stochastic else None
    return reference.dequantize(*reference.quantize(x, fmt, seed), fmt, x.shape[1])
