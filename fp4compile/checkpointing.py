"""Selective activation checkpointing: which operators of the rewritten layers to keep."""

from __future__ import annotations

import torch

# The quantizers' codes are small and dear to remake; a GEMM's result is what costs most of all.
KEPT = ("quantize", "act_quantize", "glu_quantize", "scaled_mm")


def ops_to_save() -> list[torch._ops.OpOverload]:
    """The operators whose results selective checkpointing keeps, so that backward remakes none.

    For `torch.utils.checkpoint.create_selective_checkpoint_contexts`, under `torch.compile`; add
    operators of your own layers (attention, say) to the list. What lies between them (norms, the
    residual stream) is computed again.
    """
    from .kernels import ops  # noqa: F401 - defines torch.ops.fp4

    return [getattr(torch.ops.fp4, name).default for name in KEPT]
