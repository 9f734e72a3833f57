"""Sizes, strides and who requires a gradient: nothing but the values may matter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fp4compile.kernels import ops  # noqa: F401 - defines torch.ops.fp4
from layer_oracle import (
    ARTICLE,
    EXACT,
    LOW,
    data,
    every_scheme,
    mixes,
    off,
)

fp4 = torch.ops.fp4
F32 = torch.float32
SCHEMES = every_scheme()
QUANTIZED = [text for text in SCHEMES.values() if text != "original"]
ROWS = [EXACT, ARTICLE, LOW["nvidia"], mixes(EXACT)[1], mixes(ARTICLE)[3]]


def step(x, w, b, text: str, gradient=None, seed: int = 0) -> list[torch.Tensor]:
    """y and the gradients of x, w and b with the noise of ``seed``; g is 1 unless given."""
    y = fp4.linear(x, w, b, text, F32)
    torch.manual_seed(seed)
    leaves = [t for t in (x, w, b) if t is not None and t.requires_grad]
    g = torch.ones_like(y) if gradient is None else gradient
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def assert_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("k", [0, 1, 15, 16, 17, 48, 80, 112, 144])
@pytest.mark.parametrize("m", [0, 1, 37])
def test_sizes(m: int, k: int, n: int) -> None:
    """Forward and backward of every scheme; the error is quantization's, never a lost column."""
    x, w, b = (data(*s, seed=i).requires_grad_() for i, s in enumerate(((m, k), (n, k), (n,))))
    exact = [F.linear(x, w, b)]
    exact += torch.autograd.grad(exact[0], (x, w, b), torch.ones_like(exact[0]))
    for text in SCHEMES.values():
        for got, want in zip(step(x, w, b, text), exact):
            assert got.shape == want.shape and got.isfinite().all()
            if got.numel() > 16:
                assert off(got, want) < 0.45
            if m == 0:
                assert not got.any()


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("lead", [(), (1,), (6,), (2, 3), (1, 2, 3), (3, 1, 2), (0, 3), (3, 0, 2)])
def test_leading_axes(text: str, lead: tuple[int, ...]) -> None:
    """1-D to 4-D: as the same rows in 2-D, bit for bit."""
    x, w = data(*lead, 40, seed=1).requires_grad_(), data(33, 40, seed=2).requires_grad_()
    b = data(33, seed=3).requires_grad_()
    flat = x.detach().reshape(int(torch.tensor(lead).prod()), 40).requires_grad_()
    y, dx, dw, db = step(x, w, b, text)
    assert y.shape == (*lead, 33) and dx.shape == x.shape
    want = step(flat, w, b, text)
    assert_bits(
        [y.reshape(-1, 33), dx.reshape(-1, 40), dw, db],
        [w.reshape(-1, w.shape[-1]) if w.ndim > 1 else w for w in want],
    )


@pytest.mark.parametrize("text", ROWS)
def test_chain_and_gated_of_any_size(text: str) -> None:
    for m, k, h, n in (
        (0, 16, 32, 16),
        (1, 1, 1, 1),
        (37, 17, 33, 15),
        (2, 48, 80, 1),
        (5, 16, 0, 3),
    ):
        x = data(m, k, seed=1).requires_grad_()
        w1, wu, w2 = (
            data(*s, seed=i).requires_grad_() for i, s in enumerate(((h, k), (h, k), (n, h)))
        )
        b1, b2 = data(h, seed=4).requires_grad_(), data(n, seed=5).requires_grad_()
        chain = fp4.linear_act_linear(x, w1, b1, w2, b2, "gelu", text, text, F32, F32)
        gated = fp4.gated_linear(x, w1, b1, wu, None, w2, b2, "silu", text, text, text, F32, F32)
        assert chain.shape == gated.shape == (m, n)
        for y, leaves in ((chain, (x, w1, b1, w2, b2)), (gated, (x, w1, b1, wu, w2, b2))):
            for leaf, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves)):
                assert grad.shape == leaf.shape and grad.isfinite().all()
                assert m > 0 or not grad.any()
        if m == 37:
            z = F.linear(x, w1, b1)
            assert off(chain, F.linear(F.gelu(z), w2, b2)) < 0.25
            assert off(gated, F.linear(F.silu(z) * F.linear(x, wu), w2, b2)) < 0.35


def strided(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views that hold x's values in other memory layouts."""
    wide = torch.full((x.shape[0] * 2, x.shape[1] * 2 + 3), float("nan"))
    wide[::2, 3::2] = x
    block = torch.full((x.shape[0] + 4, x.shape[1] + 5), float("nan"))
    block[2:-2, 1:-4] = x
    return {
        "transposed": x.t().contiguous().t(),
        "sliced": block[2:-2, 1:-4],
        "every second": wide[::2, 3::2],
        "flipped twice": x.flip(0).flip(0),
        "column slice of a transpose": block.t().contiguous().t()[2:-2, 1:-4],
    }


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_strides_of_inputs_weights_and_gradients(text: str) -> None:
    x, w, b = (data(*s, seed=i).requires_grad_() for i, s in enumerate(((37, 48), (33, 48), (33,))))
    g = data(37, 33, seed=5)
    want = step(x, w, b, text, g)
    for view in strided(x.detach()).values():
        assert_bits(step(view.requires_grad_(), w, b, text, g), want)
    for view in strided(w.detach()).values():
        assert_bits(step(x, view.requires_grad_(), b, text, g), want)
    for view in strided(g).values():
        assert_bits(step(x, w, b, text, view), want)
    doubled = torch.stack((b.detach(), b.detach()), 1)[:, 0].requires_grad_()
    assert_bits(step(x, w, doubled, text, g), want)


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_expanded_gradients_and_inputs(text: str) -> None:
    """Stride 0, as from `.sum()`, from a mean over tokens, and from a broadcast input."""
    x, w, b = (data(*s, seed=i).requires_grad_() for i, s in enumerate(((37, 48), (33, 48), (33,))))
    for g in (
        torch.ones(()).expand(37, 33),
        data(1, 33).expand(37, 33),
        data(37, 1).expand(37, 33),
    ):
        assert_bits(step(x, w, b, text, g), step(x, w, b, text, g.clone()))
    torch.manual_seed(0)
    sums = torch.autograd.grad(fp4.linear(x, w, b, text, F32).sum(), (x, w, b))
    assert_bits(list(sums), step(x, w, b, text)[1:])
    for broadcast in (data(1, 48).expand(37, 48), data(37, 1).expand(37, 48)):
        assert_bits(step(broadcast, w, b, text), step(broadcast.clone(), w, b, text))


def test_a_gradient_of_three_axes_that_is_transposed() -> None:
    x, w = data(4, 9, 48).requires_grad_(), data(33, 48).requires_grad_()
    g = data(9, 4, 33, seed=3).transpose(0, 1)
    assert_bits(step(x, w, None, EXACT, g), step(x, w, None, EXACT, g.contiguous()))
    swapped = data(9, 4, 48, seed=4).transpose(0, 1)
    got, want = (step(t.requires_grad_(), w, None, EXACT, g) for t in (swapped, swapped.clone()))
    assert_bits(got, want)


def test_one_tensor_in_two_places() -> None:
    w = data(48, 48).requires_grad_()
    for text in ROWS:
        y, dw, _ = step(w, w, None, text)
        x = w.detach().clone().requires_grad_()
        want = step(x, w, None, text)
        assert torch.equal(y, want[0]) and off(dw, want[1] + want[2]) < 1e-6


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_who_requires_a_gradient(text: str) -> None:
    """A frozen tensor gets no gradient and changes no bit of the others'."""
    shapes = ((37, 48), (33, 48), (33,))
    every = [data(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
    y, *grads = step(*every, text)
    for mask in range(8):
        need = [bool(mask & 1 << i) for i in range(3)]
        tensors = [t.detach().requires_grad_(n) for t, n in zip(every, need)]
        out = fp4.linear(*tensors, text, F32)
        assert torch.equal(out, y) and out.requires_grad == any(need)
        torch.manual_seed(0)
        if any(need):
            out.sum().backward()
        for t, n, want in zip(tensors, need, grads):
            assert torch.equal(t.grad, want) if n else t.grad is None
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = fp4.linear(*every, text, F32)
            assert torch.equal(out, y) and not out.requires_grad


@pytest.mark.parametrize("text", QUANTIZED)
def test_changes_between_forward_and_backward(text: str) -> None:
    """The gradient is that of the forward that ran: its codes were saved, not the tensors."""
    x, w = data(37, 48), data(33, 48, seed=1)
    want = step(x.clone().requires_grad_(), w.clone().requires_grad_(), None, text)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = fp4.linear(*leaves, None, text, F32)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(-4)
    torch.manual_seed(0)
    assert_bits([y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))], want)
    now = fp4.linear(*leaves, None, text, F32)
    assert torch.equal(now, 16 * y), "the next forward must read the new values"


def test_changes_that_an_original_gemm_cannot_allow() -> None:
    x, w = data(37, 48).requires_grad_(), data(33, 48).requires_grad_()
    y = fp4.linear(x, w, None, mixes(EXACT)[1], F32)  # dgrad reads the weight itself
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_powers_of_two_pass_through(text: str) -> None:
    """Scaling x, w or the gradient by a power of two scales the results by it, bit for bit."""
    x, w = data(37, 48), data(33, 48, seed=1)
    g = data(37, 33, seed=2)
    y, dx, dw = step(x.clone().requires_grad_(), w.clone().requires_grad_(), None, text, g)
    for a, b, c in ((-40, 0, 0), (0, 37, 0), (0, 0, -45), (30, -50, 20)):
        sx, sw, sg = 2.0**a, 2.0**b, 2.0**c
        got = step((x * sx).requires_grad_(), (w * sw).requires_grad_(), None, text, g * sg)
        assert_bits(got, [y * (sx * sw), dx * (sw * sg), dw * (sx * sg)])
