"""The primitives over the CUDA kernels; see `fallback` for the interface."""

from __future__ import annotations

import torch


def available(device: torch.device) -> bool:
    """Whether the CUDA kernels can run on ``device``."""
    return False
