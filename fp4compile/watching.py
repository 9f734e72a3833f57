"""Notice a layer that runs outside of every compiled graph although its policy names it.

Dynamo skips frames and stops at its recompile limit without asking the backend. A hook on
each linear sees these runs; in compiled graphs it is inlined to nothing. Whether a layer that
ran eagerly is part of an MLP chain (``chain: mlp``) is read off the autograd graph, where there is
none off the values: the input of the second linear is then an activation of the first's output.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from . import dynamo
from .kernels.errors import PrecisionError
from .notices import warn
from .passes.activations import ACTIVATIONS as KNOWN
from .stamp import Stamp

ACTIVATIONS = {"Gelu", "Relu", "Silu", "Tanh", "Sigmoid", "Erf", "Threshold", "LeakyRelu", "Elu"}
ACTIVATIONS |= {"Mish", "Hardswish", "Hardtanh", "Clamp", "ClampMin", "Softplus"}
BETWEEN = {"Mul", "Add", "Sub", "Rsub", "Div", "Neg", "Pow", "Exp", "Reciprocal", "NativeDropout"}
BETWEEN |= {"View", "UnsafeView", "ReshapeAlias", "Reshape", "Clone", "ToCopy", "Squeeze"}
BETWEEN |= {"Unsqueeze", "Alias"}
LIMIT = 48  # autograd nodes between two linears
VALUES = 32  # of a row, to compare two tensors by
TELLING = 4  # of them must differ from the linear's output, and must not be 0
TRIES = 8  # runs without an autograd graph in which a layer's values are compared
KEY = "fp4_layer"
MARK = "_fp4_watched"  # (name, stamp) in a watched module, for its copies


@dataclass
class Watch:
    """A linear's name and stamp; ``in_chain``: None until a graph or an eager run shows it.

    ``eager`` and ``alone`` count its runs outside of compiled graphs and as a graph of its own,
    ``tried`` those in which its chain was looked for by values.
    """

    name: str
    stamp: Stamp
    in_chain: bool | None = None
    eager: int = 0
    alone: int = 0
    tried: int = 0
    told: bool = False

    @property
    def names(self) -> list[bool]:
        """Whether the policy names the layer, in each of the cases that are possible."""
        cases = (True, False) if self.in_chain is None else (self.in_chain,)
        return [not self.stamp.decision(case).scheme.original for case in cases]


@dataclass
class _State(threading.local):
    quiet: bool = False
    compiled: list[weakref.ref] = field(default_factory=list)
    outputs: deque[tuple[weakref.ref, list[float]]] = field(
        default_factory=lambda: deque(maxlen=3)
    )


_watches: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()
_state = _State()


def watch(module: nn.Module, stamp: Stamp, name: str, copies: bool = False) -> None:
    """Notice when ``module`` runs eagerly although ``stamp`` names it.

    ``copies``: unstamped copies of it, too, by a mark that is copied with the module.
    """
    if _state.quiet:
        return
    known = _watches.get(module)
    if known is None or known.stamp != stamp:
        chain = known.in_chain if known is not None else None
        _watches[module] = Watch(name, stamp, chain)
        if copies:
            module.__dict__[MARK] = name, stamp
    if not stamp.original and _after not in module._forward_hooks.values():
        module.register_forward_hook(_after)


def seen_in_graph(module: nn.Module, in_chain: bool) -> None:
    """Record what a compiled graph shows: whether ``module`` is in a chain."""
    known = _watch_of(module)
    if known is not None:
        known.in_chain = in_chain


def eager_runs(module: nn.Module) -> int:
    """How often ``module`` ran outside of every compiled graph while it was watched."""
    known = _watch_of(module)
    return known.eager if known is not None else 0


def ran_alone(module: nn.Module) -> bool:
    """True where ``module`` was seen to run as a compiled frame of its own."""
    known = _watch_of(module)
    return known is not None and known.alone > 0


@contextmanager
def unwatched() -> Iterator[None]:
    """Eager runs are on purpose meanwhile."""
    before, _state.quiet = _state.quiet, True
    try:
        yield
    finally:
        _state.quiet = before


def own_frame(compiled: Callable) -> Callable:
    """``compiled`` is the graph of a linear's own forward, whose hook runs outside of it."""

    def call(*args: Any) -> Any:
        _state.compiled = [weakref.ref(a) for a in args if isinstance(a, Tensor)]
        return compiled(*args)

    return call


def _watch_of(module: nn.Module) -> Watch | None:
    """The watch; that of a copied or unpickled module is made from its stamp or its mark."""
    if module not in _watches:
        from .stamping import name_of, stamp_of

        name, stamp = module.__dict__.get(MARK, ("", None))
        stamp = stamp_of(module) or stamp
        if stamp is not None:
            _watches[module] = Watch(name_of(module) or name or type(module).__name__, stamp)
    return _watches.get(module)


def _after(module: nn.Module, args: Any, out: Any) -> None:
    if not torch.compiler.is_compiling():
        _ran_eagerly(module, args, out)


dynamo.eager_hook(_after)


@torch._dynamo.disable
def _ran_eagerly(module: nn.Module, args: Any, out: Any) -> None:
    """After a call from an eager frame; its forward may have been compiled alone."""
    inputs, _state.compiled = [ref() for ref in _state.compiled], []
    known = _watch_of(module)
    if known is not None and any(p is x for p in module.parameters() for x in inputs):
        known.alone += 1
        return
    _ran(module, args)
    doubtful = known is not None and known.in_chain is None and any(known.names)
    if doubtful and isinstance(out, Tensor) and out.grad_fn is not None:
        metadata: Any = out.grad_fn.metadata  # a dict; torch types it as a method
        metadata[KEY] = weakref.ref(module)
    elif doubtful and known is not None and known.tried < TRIES:
        _state.outputs.append((weakref.ref(module), _sample(out)))


def _ran(module: nn.Module, args: Any) -> None:
    known = _watch_of(module)
    if known is None or _state.quiet:
        return
    known.eager += 1
    if known.in_chain is None and any(known.names):
        chain = _chain_behind(args) or _chain_by_values(known, args)
        for module in chain:
            for found in (_watch_of(module), known):
                if found is not None:
                    found.in_chain = True
        for module in chain:
            _alarm(_watch_of(module))
    if all(known.names):
        _alarm(known)


def _alarm(known: Watch | None) -> None:
    if known is None or not all(known.names):
        return
    rule = known.stamp.decision(bool(known.in_chain)).rule
    message = (
        f"layer {known.name!r} ran outside every compiled graph, in its original precision,"
        f" although rule {rule!r} names it: Dynamo skipped its frame or hit its recompile limit, or"
        " the model was called without its compiled call; see fp4.explain"
    )
    if known.stamp.strict:
        raise PrecisionError(message)
    if not known.told:
        known.told = True
        warn(message, once=False)


def _chain_behind(args: Any) -> list[nn.Module]:
    """The linears that ran eagerly, through an activation of which ``args[0]`` was made."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.grad_fn is None:
        return []
    todo, seen, linears, active = [x.grad_fn], set(), [], False
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata: Any = node.metadata
        module = metadata.get(KEY, lambda: None)()
        kind = node.name().partition("Backward")[0]
        if module is not None:
            linears.append(module)
        elif kind not in ACTIVATIONS | BETWEEN or len(seen) > LIMIT:
            return []
        else:
            active = active or kind in ACTIVATIONS
            todo += [f for f, _ in node.next_functions if f is not None]
    return linears if active and len(linears) <= 2 else []


def _sample(x: Any) -> list[float]:
    """The first values of the first row; [] where they cannot be read."""
    if type(x) is not Tensor or x.is_meta or x.ndim == 0:
        return []
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    try:
        return x.detach()[(0,) * (x.ndim - 1)][:VALUES].tolist()
    except (RuntimeError, IndexError):  # a batched tensor of torch.func; an empty one
        return []


def _chain_by_values(known: Watch, args: Any) -> list[nn.Module]:
    """The linears before ``known`` whose outputs ``args[0]`` is an activation of, act(g) * u too.

    For runs without an autograd graph; the first rows of the tensors are compared.
    """
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.grad_fn is not None or known.tried >= TRIES:
        return []
    known.tried += 1
    values = _sample(x)
    outputs = [(ref(), sample) for ref, sample in _state.outputs]
    before = [(m, sample) for m, sample in outputs if m is not None and len(sample) == len(values)]
    for module, gate in before:
        if _is_activation(values, gate, None):
            return [module]
    for (module, gate), (other, up) in permutations(before, 2):
        if module is not other and _is_activation(values, gate, up):
            return [module, other]
    return []


def _is_activation(values: list[float], gate: list[float], up: list[float] | None) -> bool:
    """Whether ``values`` are act(gate) * up, to BF16's precision, not zeros and not ``gate``."""
    changed = sum(abs(v - g) > 0.01 * abs(g) for v, g in zip(values, gate))
    if min(changed, sum(abs(v) > 1e-6 for v in values)) < TELLING:
        return False
    triples = list(zip(values, gate, up or [1.0] * len(gate)))
    return any(all(_close(v, act, g, u) for v, g, u in triples) for act in KNOWN.values())


def _close(value: float, act: Callable[..., float], gate: float, up: float) -> bool:
    try:
        return abs(value - act(gate) * up) <= 0.02 * abs(value) + 1e-3 * abs(up)
    except ArithmeticError:
        return False
