"""Where randomness comes from: the backward alone, one seed a node, streams for its tensors."""

from __future__ import annotations

import pytest
import torch
from fp4compile.kernels import ops  # noqa: F401 - defines torch.ops.fp4
from layer_oracle import (
    ARTICLE,
    EXACT,
    LOW,
    data,
    every_scheme,
    mixes,
)
from torch.utils.checkpoint import checkpoint

fp4 = torch.ops.fp4
F32 = torch.float32
SCHEMES = {name: text for name, text in every_scheme().items() if ":sr" in text}


def leaves() -> list[torch.Tensor]:
    shapes = ((37, 48), (80, 48), (80,), (80, 48), (80,), (33, 80), (33,))
    return [data(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


def calls(text: str) -> dict:
    """Each operator as (function of its tensors, tensors)."""
    x, w1, b1, wu, bu, w2, b2 = leaves()
    chain = lambda *t: fp4.linear_act_linear(*t, "gelu", text, text, F32, F32)  # noqa: E731
    gated = lambda *t: fp4.gated_linear(*t, "silu", text, text, text, F32, F32)  # noqa: E731
    return {
        "linear": (lambda *t: fp4.linear(*t, text, F32), [x, w1, b1]),
        "chain": (chain, [x, w1, b1, w2, b2]),
        "gated": (gated, [x, w1, b1, wu, bu, w2, b2]),
    }


def step(function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    y = function(*tensors)
    return list(torch.autograd.grad(y, tensors, data(*y.shape, seed=9)))


@pytest.mark.parametrize("name", ["linear", "chain", "gated"])
@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_a_seed_repeats_a_step_and_the_next_step_differs(text: str, name: str) -> None:
    function, tensors = calls(text)[name]
    torch.manual_seed(1)
    first, second = step(function, tensors), step(function, tensors)
    torch.manual_seed(1)
    again = step(function, tensors)
    torch.manual_seed(2)
    other = step(function, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    for tensor, *grads in zip(tensors, first, second, other):
        # the last bias gradient is the unrounded gradient's sum, the others' gradients are noisy
        last_bias = tensor is tensors[-1]
        assert torch.equal(grads[0], grads[1]) == torch.equal(grads[0], grads[2]) == last_bias


@pytest.mark.parametrize("name", ["linear", "chain", "gated"])
@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_forward_draws_nothing(text: str, name: str) -> None:
    function, tensors = calls(text)[name]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    y = function(*tensors)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(function(*tensors), y)
    y.sum().backward()
    assert not torch.equal(torch.get_rng_state(), state)


def test_backward_draws_only_where_it_rounds() -> None:
    """Frozen, original or nearest: the generator stays, so that runs can be compared."""
    x, w, b = data(37, 48), data(33, 48), data(33)
    nearest = EXACT.replace(":sr", "")
    only_bias = (x, w, b.requires_grad_())
    for text, tensors in ((EXACT, only_bias), (nearest, (x.clone().requires_grad_(), w, b)),
                          (mixes(EXACT)[3], (x.clone().requires_grad_(), w.clone().requires_grad_(), b))):  # fmt: skip
        state = torch.get_rng_state()
        fp4.linear(*tensors, text, F32).sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
    fp4.linear(x.clone().requires_grad_(), w, b, EXACT, F32).sum().backward()
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_two_nodes_of_one_step_have_noise_of_their_own(text: str) -> None:
    x, w = data(37, 48), data(33, 48)
    pair = [w.clone().requires_grad_() for _ in range(2)]
    sum(fp4.linear(x, v, None, text, F32) for v in pair).backward(data(37, 33, seed=2))
    assert not torch.equal(pair[0].grad, pair[1].grad)


def test_streams_of_one_node_are_independent() -> None:
    """Gate and up over the same weight and the same gradient must not be rounded alike."""
    x, w, down = data(64, 64), data(64, 64, seed=1), data(64, 64, seed=2)
    # relu(z) * z with z > 0 everywhere: d gate = dh * up = dh * gate = d up
    x, w = x.abs(), w.abs()
    tensors = [w.clone().requires_grad_(), w.clone().requires_grad_()]
    for text in (EXACT, ARTICLE, LOW["mxfp8"]):
        y = fp4.gated_linear(
            x, tensors[0], None, tensors[1], None, down, None, "relu", text, text, text, F32, F32
        )
        gate, up = torch.autograd.grad(y.sum(), tensors)
        assert not torch.equal(gate, up)
        noise = torch.stack([(gate - up).flatten(), (gate + up).flatten()])
        assert noise[0].norm() < 0.1 * noise[1].norm()


@pytest.mark.parametrize("name", ["linear", "chain", "gated"])
@pytest.mark.parametrize("text", [*LOW.values(), *mixes(EXACT)[1:]])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(text: str, name: str, reentrant: bool) -> None:
    """The forward is run again in backward: the same codes, then the same draw."""
    function, tensors = calls(text)[name]
    torch.manual_seed(3)
    want = step(function, tensors)
    torch.manual_seed(3)
    y = checkpoint(function, *tensors, use_reentrant=reentrant)
    y.backward(data(*y.shape, seed=9))
    assert all(torch.equal(t.grad, a) for t, a in zip(tensors, want))


def test_two_backwards_through_one_graph_differ() -> None:
    """Gradient accumulation over a retained graph draws anew, so that its mean gets closer."""
    x, w = data(37, 48), data(33, 48).requires_grad_()
    y = fp4.linear(x, w, None, EXACT, F32)
    g = data(37, 33, seed=2)
    one, two = (torch.autograd.grad(y, w, g, retain_graph=True)[0] for _ in range(2))
    assert not torch.equal(one, two)
