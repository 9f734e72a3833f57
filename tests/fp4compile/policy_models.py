"""Small models for the policy's tests."""

from __future__ import annotations

import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)


class Attention(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)


class Block(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(d), Attention(d), Mlp(d)


class Gpt(nn.Module):
    def __init__(self, n: int = 12, d: int = 8) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, d)
        self.h = nn.ModuleList([Block(d) for _ in range(n)])
        self.lm_head = nn.Linear(d, 16)


class Conv1D(nn.Module):
    """Shaped like the transposed linear of Hugging Face's GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(nx, nf))


class MoeBlock(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.experts = nn.ModuleList([Mlp() for _ in range(experts)])


class Moe(nn.Module):
    def __init__(self, n: int = 3, experts: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MoeBlock(experts) for _ in range(n)])


def make_gpt() -> nn.Module:
    return Gpt()
