"""Forward and backward of the rewritten layers, as autograd functions over primitive operators.

Forward has no randomness. Backward draws one seed a node on the device (`torch.randint`): it
repeats under `torch.manual_seed` and is new in every step. Every quantized tensor of a node has its
own stream of random bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .activations import ACTIVATIONS
from .errors import InputError
from .formats import Scheme
from .layer import STREAMS, Layer, Quantized, Right, Term, acc_dtype, parts

ops = torch.ops.fp4


class Once(torch.autograd.Function):
    """Gradients that depend on ``g``; differentiating them is refused."""

    @staticmethod
    def forward(ctx, g, *grads):
        """The gradients as they are."""
        return grads

    @staticmethod
    def backward(ctx, *_):
        """Refuse: rounding has no second derivative."""
        raise InputError("fp4: no double backward; a quantized layer has first derivatives only")


def once(backward):
    """A backward that builds no graph of itself, and whose results refuse to be differentiated."""

    @functools.wraps(backward)
    def wrapper(ctx, g):
        with torch.no_grad():
            grads = backward(ctx, g)
        return Once.apply(g, *grads) if torch.is_grad_enabled() and g.requires_grad else grads

    return wrapper


def draw_seed(layers: list[tuple[Layer, bool, bool]], device: torch.device) -> Tensor | None:
    """One int64 seed on ``device``, if a backward operand that is needed rounds stochastically."""
    if any(layer.needs_seed(need_x, need_w) for layer, need_x, need_w in layers):
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return None


def rows(x: Tensor) -> Tensor:
    """x [..., C] as [R, C]; any size may be 0."""
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def save(ctx, *groups: tuple) -> None:
    """Save groups of tensors (or None) for backward; `restore` gives the groups back."""
    ctx.sizes = [len(group) for group in groups]
    ctx.save_for_backward(*[t for group in groups for t in group])


def restore(ctx) -> list[tuple]:
    """The groups that `save` saved."""
    flat, groups = list(ctx.saved_tensors), []
    for size in ctx.sizes:
        groups.append(tuple(flat[:size]))
        del flat[:size]
    return groups


def save_term(layer: Layer, z: Term) -> tuple:
    """What backward needs of a chain's first result: z's parts, or codes in the place of acc."""
    fmt = layer.scheme.preactivation
    if fmt is None:
        return z.args()
    return *ops.quantize(z.acc, str(fmt), "none", False)[:2], *z.args()[1:]


def restore_term(layer: Layer, saved: tuple, n: int) -> Term:
    """The term that `save_term` saved; acc [M, n] is rounded where it was kept as codes."""
    fmt = layer.scheme.preactivation
    if fmt is None:
        return Term(*saved)
    codes, scales, *rest = saved
    form = "f32" if acc_dtype(layer.out_dtype) == torch.float32 else "bf16"
    return Term(ops.decode(codes, scales, str(fmt), n, form, False)[:, :n], *rest)


def backward_gemms(
    layer: Layer, g: Tensor | None, quantized: tuple, saved_x: tuple, saved_w: tuple,
    need: tuple[bool, bool], seed: Tensor | None, stream: int, sizes: tuple, dtype: torch.dtype,
    rights: dict[str, Right] | None = None,
) -> tuple[Term | None, Tensor | None]:  # fmt: skip
    """DGRAD and WGRAD of one layer from the quantized gradient (g itself where original).

    ``rights``: the operands beside the gradient that are made already.
    """
    d_operand, d_factor, w_operand, w_factor = quantized[:4]
    m, n, k = sizes
    dx = dw = None
    made = rights or {}
    if need[1]:  # first: what it reads is gone before the gradient of the layer below is there
        right = made.get("wgrad")
        dw = layer.wgrad(g, w_operand, w_factor, saved_x, seed, stream, n, k, dtype, right)
    if need[0]:
        right = made.get("dgrad")
        dx = layer.dgrad(g, d_operand, d_factor, saved_w, seed, stream, m, k, right)
    return dx, dw


def backward_layer(
    layer: Layer, g: Tensor, saved_x: tuple, saved_w: tuple, need: tuple[bool, bool, bool],
    seed: Tensor | None, stream: int, k: int, dtype: torch.dtype, maxima: tuple = (),
) -> tuple[Term | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx (before its factors), dw and the FP32 bias gradient of one layer; g is [M, N].

    ``maxima``: those of g's rows and folded columns, where they are known.
    """
    need_x, need_w, need_b = need
    d_fmt, w_fmt, d_form, w_form = layer.gradient_formats(need_x, need_w)
    if d_fmt and w_fmt and layer.one_orientation_at_a_time:
        rest = (seed, stream, k, dtype, maxima)
        _, dw, db = backward_layer(
            layer, g, saved_x, saved_w, (False, need_w, need_b), *rest
        )
        dx, _, _ = backward_layer(layer, g, saved_x, saved_w, (need_x, False, False), *rest)
        return dx, dw, db
    quantized: tuple = (None,) * 5
    rights: dict[str, Right] = {}
    if layer.one_orientation_at_a_time and (d_fmt or w_fmt):
        # before the gradient's operand: the saved codes are then gone when it is made
        name, saved = ("dgrad", saved_w) if d_fmt else ("wgrad", saved_x)
        rights[name] = layer.right(name, saved, k, seed, stream)
    if d_fmt or w_fmt or need_b:
        fold = layer.fold(saved_x, need_w)
        forms = (d_fmt, w_fmt, d_form, w_form)
        quantized = ops.quantize_grad(g, fold, *forms, need_b, seed, stream, *maxima)
    sizes = (*g.shape, k)
    dx, dw = backward_gemms(
        layer, g, quantized, saved_x, saved_w, (need_x, need_w), seed, stream, sizes, dtype, rights
    )
    return dx, dw, quantized[4] if need_b else None


def _shaped(dx: Term | None, like_shape, dtype: torch.dtype) -> Tensor | None:
    return None if dx is None else dx.value(dtype).reshape(like_shape)


def _bias(db: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if db is None or dtype is None else db.to(dtype)


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


class Linear(torch.autograd.Function):
    """y = x w^T + bias; x [..., K], w [N, K]."""

    @staticmethod
    def forward(ctx, x, weight, bias, scheme, out_dtype, ready=None):
        """Quantize, multiply, save codes."""
        layer = Layer(Scheme.parse(scheme), out_dtype, x.device)
        x2 = rows(x)
        xq, wq = layer.quantize_activation(x2), layer.quantize_weight(weight, ready)
        need_x, need_w = ctx.needs_input_grad[:2]
        save(
            ctx,
            layer.saved_activation(x2, xq) if need_w else (),
            layer.saved_weight(weight, wq) if need_x else (),
        )
        ctx.layer, ctx.shape, ctx.dtypes = layer, x.shape, (x.dtype, weight.dtype, _dtype(bias))
        y = layer.fprop(x2, xq, weight, wq, bias).value(out_dtype)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once
    def backward(ctx, g):
        """Gradients of x, weight and bias."""
        saved_x, saved_w = restore(ctx)
        need = ctx.needs_input_grad[:3]
        seed = draw_seed([(ctx.layer, *need[:2])], g.device)
        dx, dw, db = backward_layer(
            ctx.layer, rows(g), saved_x, saved_w, need, seed, 0,
            ctx.shape[-1], ctx.dtypes[1],
        )  # fmt: skip
        db = _bias(db, ctx.dtypes[2])
        return _shaped(dx, ctx.shape, ctx.dtypes[0]), dw, db, None, None, None


class Chain(torch.autograd.Function):
    """y = act(x w1^T + b1) w2^T + b2; the hidden tensor exists only as codes."""

    @staticmethod
    def forward(
        ctx, x, w1, b1, w2, b2, act, scheme1, scheme2, hidden_dtype, out_dtype, ready=None
    ):
        """First GEMM, activation and quantize in one primitive, second GEMM."""
        first = Layer(Scheme.parse(scheme1), hidden_dtype, x.device)
        second = Layer(Scheme.parse(scheme2), out_dtype, x.device)
        x2 = rows(x)
        xq = first.quantize_activation(x2)
        ready1, ready2 = parts(ready, 2)
        wq1, wq2 = first.quantize_weight(w1, ready1), second.quantize_weight(w2, ready2)
        z = first.fprop(x2, xq, w1, wq1, b1)
        hq = quantize_hidden(second, ops.act_quantize, (*z.args(), act))
        need_x, need_w1, need_b1, need_w2 = ctx.needs_input_grad[:4]
        need_h = need_x or need_w1 or need_b1
        save(
            ctx,
            first.saved_activation(x2, xq) if need_w1 else (),
            first.saved_weight(w1, wq1) if need_x else (),
            save_term(first, z) if need_h else (),
            second.saved_activation(z.acc, hq) if need_w2 else (),
            second.saved_weight(w2, wq2) if need_h else (),
        )
        ctx.layers, ctx.act, ctx.shape = (first, second), act, x.shape
        ctx.dtypes = x.dtype, w1.dtype, _dtype(b1), w2.dtype, _dtype(b2)
        ctx.hidden = w2.shape[1]
        y = second.fprop(z.acc, hq, w2, wq2, b2).value(out_dtype)
        return y.reshape(*x.shape[:-1], w2.shape[0])

    @staticmethod
    @once
    def backward(ctx, g):
        """Gradients of x and both layers' parameters."""
        (first, second), dtypes = ctx.layers, ctx.dtypes
        saved_x, saved_w1, z, saved_h, saved_w2 = restore(ctx)
        need_x, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad[:5]
        need_h = need_x or need_w1 or need_b1
        seed = draw_seed([(second, need_h, need_w2), (first, need_x, need_w1)], g.device)
        gh, dw2, db2 = backward_layer(
            second, rows(g), saved_h, saved_w2, (need_h, need_w2, need_b2),
            seed, 0, ctx.hidden, dtypes[3],
        )  # fmt: skip
        dx, dw1, db1 = None, None, None
        if gh is not None:
            term = restore_term(first, z, ctx.hidden)
            dx, dw1, db1 = backward_hidden(
                first, gh, term, ctx.act, saved_x, saved_w1, (need_x, need_w1, need_b1),
                seed, STREAMS, ctx.shape[-1], dtypes[1],
            )  # fmt: skip
        return (
            _shaped(dx, ctx.shape, dtypes[0]), dw1, _bias(db1, dtypes[2]), dw2,
            _bias(db2, dtypes[4]), None, None, None, None, None, None,
        )  # fmt: skip


def quantize_hidden(layer: Layer, op, args: tuple) -> Quantized:
    """The hidden tensor as ``layer``'s forward operand, by a fused primitive."""
    assert layer.scheme.fprop is not None
    fmt = layer.scheme.fprop[0].format
    return Quantized(*op(*args, str(fmt), layer.engine("fprop").operand))


def backward_hidden(
    layer: Layer, gh: Term, z: Term, act: str, saved_x: tuple, saved_w: tuple,
    need: tuple[bool, bool, bool], seed: Tensor | None, stream: int, k: int, dtype: torch.dtype,
) -> tuple[Term | None, Tensor | None, Tensor | None]:  # fmt: skip
    """As `backward_layer` for g = gh * act'(z), in one primitive where both GEMMs quantize.

    Where `Layer.stores_hidden_gradient`, g is a tensor of its own.
    """
    need_x, need_w, need_b = need
    d_fmt, w_fmt, d_form, w_form = layer.gradient_formats(need_x, need_w)
    apart = (need_x and not d_fmt) or (need_w and not w_fmt) or not (need_x or need_w)
    rest = (saved_x, saved_w, need, seed, stream, k, dtype)
    if layer.stores_hidden_gradient:
        fold = layer.fold(saved_x, need_w)
        amax = layer.needs_maxima(need_x, need_w)
        dz, *maxima = ops.act_grad(*gh.args()[:3], *z.args(), act, fold, amax)
        return backward_layer(layer, dz, *rest, tuple(maxima) if amax else ())
    if apart:
        dz = ACTIVATIONS[act].backward(gh.value(torch.float32), z.value(torch.float32))
        return backward_layer(layer, dz, *rest)
    fold = layer.fold(saved_x, need_w)
    quantized = ops.act_grad_quantize(
        *gh.args()[:3], *z.args(), act, fold, d_fmt, w_fmt, d_form, w_form, need_b, seed, stream
    )
    sizes = (*z.acc.shape, k)
    dx, dw = backward_gemms(
        layer, None, quantized, saved_x, saved_w, (need_x, need_w), seed, stream, sizes, dtype
    )
    return dx, dw, quantized[4] if need_b else None


class Gated(torch.autograd.Function):
    """y = (act(x wg^T + bg) * (x wu^T + bu)) wd^T + bd; the hidden tensor exists only as codes."""

    @staticmethod
    def forward(
        ctx, x, wg, bg, wu, bu, wd, bd, act, schemes, hidden_dtype, out_dtype, ready=None
    ):
        """Gate and up GEMMs, activation, product and quantize in one primitive, down GEMM."""
        gate, up = (Layer(Scheme.parse(s), hidden_dtype, x.device) for s in schemes[:2])
        down = Layer(Scheme.parse(schemes[2]), out_dtype, x.device)
        x2 = rows(x)
        xqg = gate.quantize_activation(x2)
        xqu = xqg if gate.same_activation(up) else up.quantize_activation(x2)
        layers, weights = (gate, up, down), (wg, wu, wd)
        wqg, wqu, wqd = (
            layer.quantize_weight(w, r) for layer, w, r in zip(layers, weights, parts(ready, 3))
        )
        zg, zu = gate.fprop(x2, xqg, wg, wqg, bg), up.fprop(x2, xqu, wu, wqu, bu)
        hq = quantize_hidden(down, ops.glu_quantize, (*zg.args(), *zu.args(), act))
        need_x, need_wg, need_bg, need_wu, need_bu, need_wd = ctx.needs_input_grad[:6]
        need_h = need_x or need_wg or need_bg or need_wu or need_bu
        save(
            ctx,
            gate.saved_activation(x2, xqg) if need_wg else (),
            up.saved_activation(x2, xqu) if need_wu else (),
            gate.saved_weight(wg, wqg) if need_x else (),
            up.saved_weight(wu, wqu) if need_x else (),
            save_term(gate, zg) if need_h else (),
            save_term(up, zu) if need_h else (),
            down.saved_activation(zg.acc, hq) if need_wd else (),
            down.saved_weight(wd, wqd) if need_h else (),
        )
        ctx.layers, ctx.act, ctx.shape, ctx.hidden = (gate, up, down), act, x.shape, wd.shape[1]
        ctx.dtypes = x.dtype, *(_dtype(t) for t in (wg, bg, wu, bu, wd, bd))
        y = down.fprop(zg.acc, hq, wd, wqd, bd).value(out_dtype)
        return y.reshape(*x.shape[:-1], wd.shape[0])

    @staticmethod
    @once
    def backward(ctx, g):
        """Gradients of x and the three layers' parameters."""
        gate, up, down = ctx.layers
        x_dtype, *dtypes = ctx.dtypes
        saved_xg, saved_xu, saved_wg, saved_wu, zg, zu, saved_h, saved_wd = restore(ctx)
        need_x, need_wg, need_bg, need_wu, need_bu, need_wd, need_bd = ctx.needs_input_grad[:7]
        need_g, need_u = (need_x, need_wg, need_bg), (need_x, need_wu, need_bu)
        need_h = any(need_g) or any(need_u)
        seed = draw_seed(
            [(down, need_h, need_wd), (gate, need_x, need_wg), (up, need_x, need_wu)], g.device
        )
        gh, dwd, dbd = backward_layer(
            down, rows(g), saved_h, saved_wd, (need_h, need_wd, need_bd),
            seed, 0, ctx.hidden, dtypes[4],
        )  # fmt: skip
        dxg = dxu = dwg = dwu = dbg = dbu = None
        if gh is not None:
            terms = restore_term(gate, zg, ctx.hidden), restore_term(up, zu, ctx.hidden)
            both = backward_gated(
                (gate, up), gh, terms, ctx.act, (saved_xg, saved_xu),
                (saved_wg, saved_wu), (need_g, need_u), seed, ctx.shape[-1], (dtypes[0], dtypes[2]),
            )  # fmt: skip
            (dxg, dwg, dbg), (dxu, dwu, dbu) = both
        dx = None
        if dxg is not None and dxu is not None:
            total = dxg.value(torch.float32) + dxu.value(torch.float32)
            dx = total.to(x_dtype).reshape(ctx.shape)
        return (
            dx, dwg, _bias(dbg, dtypes[1]), dwu, _bias(dbu, dtypes[3]), dwd, _bias(dbd, dtypes[5]),
            None, None, None, None, None,
        )  # fmt: skip


def backward_gated(
    layers: tuple[Layer, Layer], gh: Term, zs: tuple[Term, Term], act: str, saved_x: tuple,
    saved_w: tuple, needs: tuple, seed: Tensor | None, k: int, dtypes: tuple,
) -> list[tuple]:  # fmt: skip
    """dx, dw, db of gate and of up, from the gradient of act(gate) * up."""
    formats = [a.gradient_formats(*need[:2]) for a, need in zip(layers, needs)]
    streams = (STREAMS, 2 * STREAMS)
    folds = [a.fold(x, need[1]) for a, x, need in zip(layers, saved_x, needs)]
    stored = layers[0].stores_hidden_gradient
    if stored or not all(f[0] and f[1] for f in formats):
        maxima: list[tuple] = [(), ()]
        if stored:
            amax = any(a.needs_maxima(*need[:2]) for a, need in zip(layers, needs))
            terms = (*gh.args()[:3], *zs[0].args(), *zs[1].args())
            both = ops.glu_grad(*terms, act, *folds, amax)
            grads: tuple = (both[0], both[3])
            maxima = [tuple(both[1:3]), tuple(both[4:])] if amax else maxima
        else:
            grads = _gated_gradients(gh, zs, act)
        return [
            backward_layer(a, dz, x, w, need, seed, stream, k, dtype, known)
            for a, dz, x, w, need, stream, dtype, known
            in zip(layers, grads, saved_x, saved_w, needs, streams, dtypes, maxima)
        ]  # fmt: skip
    (dg, wg, odg, owg), (du, wu, odu, owu) = formats
    quantized = ops.glu_grad_quantize(
        *gh.args()[:3], *zs[0].args(), *zs[1].args(), act, *folds, dg, wg, du, wu,
        odg, owg, odu, owu, needs[0][2], needs[1][2], seed, STREAMS,
    )  # fmt: skip
    out = []
    sizes = (*zs[0].acc.shape, k)
    for i, (a, need) in enumerate(zip(layers, needs)):
        part = quantized[5 * i : 5 * i + 5]
        gemms = backward_gemms(
            a, None, part, saved_x[i], saved_w[i], need[:2], seed, streams[i], sizes, dtypes[i]
        )
        out.append((*gemms, part[4] if need[2] else None))
    return out


def _gated_gradients(gh: Term, zs: tuple[Term, Term], act: str) -> tuple[Tensor, ...]:
    dh, gate, up = (t.value(torch.float32) for t in (gh, *zs))
    row = ACTIVATIONS[act]
    return row.backward(dh * up, gate), dh * row.forward(gate)
