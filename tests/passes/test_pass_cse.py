"""Equal fp4 nodes are merged, unequal ones are not, and the count is the number removed."""

import pytest
import torch
from fp4compile.passes.cse import merge_equal
from torch.fx.experimental.proxy_tensor import make_fx

CALLS = []


@pytest.fixture(scope="module", autouse=True)
def op():
    """A stand-in for the primitives: two outputs, a tensor, a text and a number as arguments."""
    import fp4compile.kernels.ops  # noqa: F401

    lib = torch.library.Library("fp4", "FRAGMENT")
    lib.define("test_codes(Tensor x, str format, float s=1.0) -> (Tensor, Tensor)")
    lib.define("test_write_(Tensor(a!) x) -> ()")

    def impl(x, format, s=1.0):
        CALLS.append(format)
        return x * 2, x.sum().reshape(1)

    lib.impl("test_codes", impl, "CPU")
    lib.impl("test_codes", lambda x, format, s=1.0: (torch.empty_like(x), x.new_empty(1)), "Meta")
    lib.impl("test_write_", lambda x: None, "CPU")
    lib.impl("test_write_", lambda x: None, "Meta")
    yield torch.ops.fp4.test_codes
    lib._destroy()


def run(function):
    """(count, the op's calls, calls left after merging) for a function of x[2, 3, 4]."""
    x = torch.randn(2, 3, 4)
    want = function(x)
    gm = make_fx(function, tracing_mode="fake")(x)
    before = len([n for n in gm.graph.nodes if "test_codes" in str(n.target)])
    count = merge_equal(gm)
    CALLS.clear()
    got = gm(x)
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    return count, before, len(CALLS)


def test_equal_calls_are_merged_with_their_outputs(op):
    def qkv(x):
        parts = [op(x, "nvfp4") for _ in range(3)]
        return [codes + outer for codes, outer in parts]

    assert run(qkv) == (2, 3, 1)


def test_views_between_are_merged_and_not_counted(op):
    def function(x):
        a = op(x.reshape(6, 4), "nvfp4")[0]
        b = op(x.reshape(6, 4), "nvfp4")[0]
        return op(a, "mxfp8")[0] + op(b, "mxfp8")[0]

    assert run(function) == (2, 4, 2)


@pytest.mark.parametrize(
    "second",
    [
        lambda op, x: op(x, "mxfp8"),
        lambda op, x: op(x + 0, "nvfp4"),
        lambda op, x: op(x, "nvfp4", 2.0),
        lambda op, x: op(x.flip(0), "nvfp4"),
    ],
)
def test_unequal_calls_stay(op, second):
    assert run(lambda x: op(x, "nvfp4")[0] + second(op, x)[0]) == (0, 2, 2)


def test_other_operations_are_not_touched(op):
    def function(x):
        return torch.sin(x) + torch.sin(x) + op(x, "nvfp4")[0]

    gm = make_fx(function, tracing_mode="fake")(torch.randn(2, 4))
    assert merge_equal(gm) == 0
    assert sum("sin" in str(n.target) for n in gm.graph.nodes) == 2


def test_random_and_mutable_operations_are_not_merged(op):
    def function(x):
        torch.ops.fp4.test_write_(x)
        torch.ops.fp4.test_write_(x)
        return torch.rand_like(x) - torch.rand_like(x)

    gm = make_fx(function, tracing_mode="fake")(torch.randn(2, 4))
    nodes = len(gm.graph.nodes)
    assert merge_equal(gm) == 0 and len(gm.graph.nodes) == nodes


def test_numbers_of_different_types_are_different(op):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    calls = [graph.call_function(op.default, (x, "nvfp4", s)) for s in (1, 1.0, True, 1.0)]
    graph.output(calls)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert merge_equal(gm) == 1
    assert len([n for n in gm.graph.nodes if n.op == "call_function"]) == 3
