"""How Inductor lowers the primitives: each stays one opaque call; everything around them fuses.

`scaled_mm` becomes a call that writes into a buffer of Inductor's own, so that its memory is taken
from buffers that are done with and others may write over it: pointwise kernels, `act_grad` and
`glu_grad`. The rest allocate their results themselves.
"""

from __future__ import annotations

from functools import cache, partial

import torch


@cache
def register() -> None:
    """Register every primitive as an extern call, once a process, without Inductor's warnings."""
    from torch._inductor.lowering import add_layout_constraint, lowerings, make_fallback

    from . import ops, primitives  # noqa: F401 - defines the operators

    for name in primitives.NAMES:
        op = getattr(torch.ops.fp4, name).default
        if op not in lowerings:
            make_fallback(op, warn=False)
            add_layout_constraint(op, _strides)
    fp4 = torch.ops.fp4
    lowerings[fp4.scaled_mm.default] = partial(_scaled_mm, lowerings[fp4.scaled_mm.default])
    for op, inplace in ((fp4.act_grad, fp4.act_grad_), (fp4.glu_grad, fp4.glu_grad_)):
        lowerings[op.default] = partial(_grad, lowerings[op.default], lowerings[inplace.default])


def _strides(fx_node, *args, **kwargs):
    """The stride order that the trace saw, for inputs that are stored once and not copied.

    A pointwise result that is not stored yet would be copied for each operator that reads it, and
    the copy is never written over what it is made of.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import constrain_to_fx_strides

    for arg in args:
        if isinstance(arg, ir.TensorBox) and isinstance(arg.data, ir.StorageBox):
            arg.realize()
    return constrain_to_fx_strides(fx_node, *args, **kwargs)


def _scaled_mm(fallback, a, b, engine, m, n, out_dtype, *beside):
    """`primitives.scaled_mm` as an extern kernel with a preallocated result [m, n]."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper or 0 in (*a.get_size(), *b.get_size()):
        return fallback(a, b, engine, m, n, out_dtype, *beside)
    tensors = [a, b, *(t for t in beside if t is not None)]  # scales and outer scales come in pairs
    inputs = [ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(t)) for t in tensors]
    name = {2: "out", 4: "scales_out", 6: "outer_out"}[len(tensors)]
    kernel = ir.ExternKernelOut(
        ir.FixedLayout(a.get_device(), out_dtype, [m, n]),
        inputs,
        (engine, m, n),
        python_kernel_name=f"torch.ops.fp4.scaled_mm.{name}",
        op_overload=getattr(torch.ops.fp4.scaled_mm, name),
    )
    return ir.TensorBox.create(kernel)


def _grad(fallback, inplace, g, *args):
    """`act_grad` or `glu_grad`, over g where g is a GEMM's result that nothing else reads."""
    from torch._inductor.virtualized import V

    node = V.graph.current_node.args[0]
    if node.target is not torch.ops.fp4.scaled_mm.default or len(node.users) > 1:
        return fallback(g, *args)
    return g, *inplace(g, *args)
