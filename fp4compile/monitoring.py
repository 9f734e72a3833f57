"""`fp4.monitor`: figures of every quantized layer while it trains, in one step of many.

The figures come from what a sampled step computes anyway (`sampling.py`, `kernels/health.py`). They
are copied to the host while training goes on, and written when they have arrived. Steps between
have the kernels that they have without a monitor; no graph is compiled again for one.
"""

from __future__ import annotations

import csv
import math
import weakref
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .blocks import unwrap
from .explaining import recorded
from .kernels.errors import Fp4Error, InputError
from .kernels.health import Quantization, Rows
from .notices import warn
from .sampling import MODEL, Key, Sample, stacked
from .tables import paragraph, table, terminal_width

KEPT = 100  # sampled steps whose readings stay in memory
OPERANDS = (
    "fprop.activation", "fprop.weight", "dgrad.gradient", "wgrad.gradient", "dgrad.weight",
    "wgrad.activation",
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """One operand of one layer in one step.

    ``operand`` and ``format`` in the words of a policy. ``error``: ||decoded - x|| / ||x||;
    ``zeros``: the share that became 0 without being it; ``saturated``: the share that lies beyond
    the last code of its block by more than half a step (None for gradients, whose scales are
    rounded up, and a scale search may choose it); ``rms`` and ``amax`` of the tensor. These are of
    the sampled rows. ``nan_rows``: how many of all ``rows`` of the operand are not finite.
    """

    step: int
    layer: str
    operand: str
    format: str
    error: float
    zeros: float
    saturated: float | None
    nan_rows: int
    rows: int
    rms: float
    amax: float


FIGURES = ("error", "zeros", "saturated", "nan_rows", "rms", "amax")
Copied = tuple[list[tuple[Key, Quantization]], Tensor, "torch.cuda.Event | None"]


def monitor(
    model: nn.Module,
    every: int = 50,
    *,
    rows: int = 64,
    csv: str | Path | None = None,
    tensorboard: Any = None,
    step: int = 0,
    automatic: bool = True,
) -> Monitor:
    """Sample every quantized layer of ``model`` in each ``every``-th training step, from now on.

    A training step ends with a step of the first `torch.optim.Optimizer` that holds parameters of
    the model, or, with ``automatic=False``, where `Monitor.step` is called. ``step`` is the number
    of the step to come. ``rows``: about so many rows of each tensor are compared with their codes.
    ``csv``: a file to append to; ``tensorboard``: a directory, or a writer with ``add_scalar``.
    With several processes each writes its own, the rank in its name. Calls without gradients are
    not sampled. Under CUDA graphs nothing can be; that is warned of.

    Raises:
        InputError: for numbers below 1, and where the model holds no parameters.
        Fp4Error: for a directory without the package tensorboard.
    """
    return Monitor(model, every, rows, csv, tensorboard, step, automatic)


class Monitor:
    """Figures by step and layer; a context manager that stops at its end. See `monitor`."""

    def __init__(
        self, model: nn.Module, every: int, rows: int, csv: Any, tensorboard: Any, step: int,
        automatic: bool,
    ) -> None:  # fmt: skip
        for name, value, least in (("every", every, 1), ("rows", rows, 1), ("step", step, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"fp4.monitor: {name}={value!r}: a whole number from {least} on")
        self.model, self.every, self.rows = unwrap(model), every, rows
        self._parameters = {id(p) for p in self.model.parameters()}
        if not self._parameters:
            raise InputError("fp4.monitor: the model has no parameters")
        self.next_step = step
        self.unseen: list[str] = []
        self._seen: set[str] | None = None
        self._told: set[tuple[str, str]] = set()
        self._automatic = automatic
        self._kept: deque[list[Reading]] = deque(maxlen=KEPT)
        self._pending: deque[tuple[int, list[Copied]]] = deque()
        self._sample: Sample | None = None
        self._turn = 0
        self._hook: Any = None
        self._clock: weakref.ref[Optimizer] | None = None
        self._table = _Table(_of_rank(csv)) if csv is not None else None
        self._writer, self._own_writer = _writer(tensorboard)
        self.start()

    # on and off -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Sample again after `stop`."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._after_optimizer)
            self._open()

    def stop(self) -> None:
        """Sample no more, and write what is there; a step that has begun counts."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        self._close(complete=False)
        self._drain(wait=True)
        if self._own_writer:
            self._writer.flush()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    # steps ----------------------------------------------------------------------------------------

    @torch._dynamo.disable
    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._automatic:
            return
        clock = self._clock() if self._clock is not None else None
        if clock is None and self._holds(optimizer):
            self._clock, clock = weakref.ref(optimizer), optimizer
        if optimizer is clock:
            self.step()

    def _holds(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(id(p) in self._parameters for group in groups for p in group["params"])

    def step(self) -> None:
        """A training step has ended; called by the optimizer's step unless ``automatic=False``."""
        if self._sample is not None:
            self._close(complete=True)
        self.next_step += 1
        if self._pending:
            self._drain(wait=False)
        if self._hook is not None:
            self._open()

    def _open(self) -> None:
        if self.next_step % self.every == 0:
            self._sample = Sample(self.model, Rows(self.rows, 7 * self._turn))
            self._sample.open()
            self._turn += 1

    def _close(self, complete: bool) -> None:
        sample, self._sample = self._sample, None
        if sample is None:
            return
        sample.close()
        found = sample.found()
        if complete or found:
            self._notice(sample, {layer for layer, _ in found})
        if found:
            self._pending.append((self.next_step, [_copied(*part) for part in stacked(found)]))

    def _notice(self, sample: Sample, seen: set[str]) -> None:
        """Layers that the policy quantizes and that were not seen: never without a word."""
        if seen == self._seen and not sample.graphed:
            return
        self._seen = seen
        report = recorded(self.model)
        wanted = dict.fromkeys(row.fqn or MODEL for row in report.rewritten) if report else {}
        halves = {name.partition("[")[0] for name in seen}
        self.unseen = [name for name in wanted if name not in seen | halves]
        if not self.unseen and (report is not None or seen):
            return
        if sample.graphed or sample.captured:
            why = "CUDA graphs replay kernels without the code that samples; compile without them"
        elif report is None:
            why = 'no graph of this model was compiled with backend="fp4"'
        else:
            why = "no compiled graph of this model ran them with gradients in this step"
        what = f"{len(self.unseen)} of {len(wanted)} quantized layers" if wanted else "the layers"
        if (what, why) not in self._told:
            self._told.add((what, why))
            text = f"fp4.monitor: {what} were not sampled in step {self.next_step}: {why}"
            warn(text, once=False)

    # results --------------------------------------------------------------------------------------

    def _drain(self, wait: bool) -> None:
        """Take what has arrived on the host; with ``wait``, all."""
        while self._pending:
            step, parts = self._pending[0]
            events = [event for *_, event in parts if event is not None]
            if wait:
                for event in events:
                    event.synchronize()
            elif not all(event.query() for event in events):
                return
            self._pending.popleft()
            self._write(_readings(step, parts))

    def _write(self, readings: list[Reading]) -> None:
        self._kept.append(readings)
        if self._table is not None:
            self._table.write(readings)
        if self._writer is not None:
            for r in readings:
                for name in FIGURES:
                    value = getattr(r, name)
                    if value is not None:
                        tag = f"fp4/{r.operand}/{name}/{r.layer}"
                        self._writer.add_scalar(tag, value, r.step)

    @property
    def readings(self) -> list[Reading]:
        """Of the last 100 sampled steps, in order; waits for figures that are on their way."""
        self._drain(wait=True)
        return [reading for readings in self._kept for reading in readings]

    def as_dict(self) -> dict[int, dict[str, dict[str, dict[str, Any]]]]:
        """{step: {layer: {operand: {figure: value}}}}, for JSON."""
        found: dict[int, dict[str, dict[str, dict[str, Any]]]] = {}
        for r in self.readings:
            values = asdict(r)
            for key in ("step", "layer", "operand"):
                del values[key]
            found.setdefault(r.step, {}).setdefault(r.layer, {})[r.operand] = values
        return found

    def __str__(self) -> str:
        found = self.as_dict()
        if not found:
            return "fp4.monitor: nothing sampled yet"
        step, width = max(found), terminal_width()
        lines = table(HEADS, [_row(*item) for item in found[step].items()], width, HEADS[:1])
        text = f"step {step}, {len(found[step])} layers; all but NaN rows of {self.rows} rows or so"
        if self.unseen:
            text += f"; {len(self.unseen)} more layers were not sampled: {', '.join(self.unseen)}"
        return "\n".join([*lines, "", *paragraph("", text, width)])


HEADS = (
    "layer", "x", "w", "g", "x zeros", "g zeros", "sat.", "NaN rows", "g rms", "g amax",
)  # fmt: skip


def _row(layer: str, operands: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """One layer in the table: its activation, weight and gradient, wherever they are quantized."""
    x = operands.get("fprop.activation") or operands.get("wgrad.activation") or {}
    w = operands.get("fprop.weight") or operands.get("dgrad.weight") or {}
    g = operands.get("dgrad.gradient") or operands.get("wgrad.gradient") or {}
    saturated = [o["saturated"] for o in operands.values() if o["saturated"] is not None]
    return (
        layer, *(_share(o.get("error")) for o in (x, w, g)), _share(x.get("zeros")),
        _share(g.get("zeros")), _share(max(saturated, default=None)),
        str(sum(o["nan_rows"] for o in operands.values())),
        *(f"{g[name]:.1e}" if g else "" for name in ("rms", "amax")),
    )  # fmt: skip


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _copied(device: torch.device, made: list, sums: Tensor) -> Copied:
    """On its way to the host, behind what the device has to do."""
    if device.type != "cuda":
        return made, sums.cpu(), None
    target = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    with torch.cuda.device(device):
        target.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return made, target, event


def _readings(step: int, parts: list[Copied]) -> list[Reading]:
    """What arrived, layer by layer; several quantizations of one operand are added up."""
    found: dict[Key, list[tuple[Quantization, list[float]]]] = {}
    for made, sums, _ in parts:
        for (key, quantization), values in zip(made, sums.tolist()):
            found.setdefault(key, []).append((quantization, values))
    order = {name: i for i, name in enumerate(OPERANDS)}
    layers = {layer: i for i, (layer, _) in reversed(list(enumerate(found)))}
    keys = sorted(found, key=lambda key: (layers[key[0]], order[key[1]]))
    return [_reading(step, key, found[key]) for key in keys]


def _reading(step: int, key: Key, made: list[tuple[Quantization, list[float]]]) -> Reading:
    first = made[0][0]
    off, size = (sum(v[i] ** 2 for _, v in made) ** 0.5 for i in (0, 1))
    n = sum(q.sampled for q, _ in made)
    bad = int(max(v[5] for _, v in made))
    nothing = math.nan if bad == first.rows else 0.0  # left to compare
    return Reading(
        step, *key, first.format,
        error=off / size if size else nothing,
        zeros=sum(v[2] for _, v in made) / n,
        saturated=sum(v[3] for _, v in made) / n if first.side == "forward" else None,
        nan_rows=bad,
        rows=first.rows,
        rms=size / n**0.5,
        amax=max(v[4] for _, v in made),
    )  # fmt: skip


# Files --------------------------------------------------------------------------------------------


def _of_rank(path: str | Path) -> Path:
    """``path`` with the rank in its name, where there are several processes."""
    path, distributed = Path(path), torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return path
    if distributed.get_world_size() == 1:
        return path
    return path.with_name(f"{path.stem}.rank{distributed.get_rank()}{path.suffix}")


class _Table:
    """A CSV file that grows; its columns are the fields of `Reading`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, readings: list[Reading]) -> None:
        """Append, after a line of names at the file's beginning."""
        names = [f.name for f in fields(Reading)]
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, names)
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(asdict(r) for r in readings)


def _writer(tensorboard: Any) -> tuple[Any, bool]:
    """A writer with ``add_scalar``, and whether it was made here."""
    if tensorboard is None or hasattr(tensorboard, "add_scalar"):
        return tensorboard, False
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Fp4Error(
            "fp4.monitor: tensorboard is missing; pip install tensorboard, or use csv="
        ) from None
    return SummaryWriter(str(_of_rank(tensorboard))), True
