"""Counter-based random bits: Philox4x32-10 (Salmon et al., SC 2011), on the tensor's device.

Words are held in int64 tensors; products wrap modulo 2^64, of which every bit is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
LANES = 8  # 16-bit values of one counter


def philox(key: tuple[Tensor, Tensor], counter: list[Tensor]) -> list[Tensor]:
    """Four output words for ``key`` (k0, k1) and ``counter`` (four words), int64 in [0, 2^32)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def _lanes(seed: Tensor, stream: int, group: Tensor) -> Tensor:
    """The eight 16-bit values of each counter ``group`` (int64 [G]) -> int32 [G, 8]."""
    seed = seed.reshape(())
    zero = torch.zeros_like(group)
    counter = [group & _MASK, (group >> 32) & _MASK, zero + (stream & _MASK), zero]
    words = torch.stack(philox((seed & _MASK, (seed >> 32) & _MASK), counter), -1)
    return torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1).to(torch.int32)


def random16(seed: Tensor, stream: int, index: int | Tensor) -> Tensor:
    """16-bit random values of elements, int32 in [0, 65535], on the seed's device.

    ``seed``: int64, one element, any value. ``stream``: the quantized tensor's own number.
    ``index``: int64 element numbers (any shape), or a count n for elements 0 .. n - 1.
    Element i is lane i mod 8 of counter i // 8.
    """
    if isinstance(index, Tensor):
        lanes = _lanes(seed, stream, (index >> 3).flatten())
        return lanes.gather(1, (index & 7).reshape(-1, 1)).reshape(index.shape)
    group = torch.arange((index + LANES - 1) // LANES, device=seed.device)
    return _lanes(seed, stream, group).flatten()[:index]
