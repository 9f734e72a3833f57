"""Few tokens with CUDA graphs: a GPT one token at a time with a KV cache, and an MLP's forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..policy import Policy
from .arms import ATTENTION, MLP_ONLY
from .models import MLP
from .timing import header
from .training import measure, with_ratios


class CachedAttention(nn.Module):
    """Self-attention of one new token over a cache of ``context`` keys and values."""

    def __init__(self, d: int, heads: int, batch: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        shape = (batch, heads, context, d // heads)
        self.keys, self.values = nn.Buffer(torch.zeros(shape)), nn.Buffer(torch.zeros(shape))

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """x [B, 1, d], position [1], mask [1, context] -> [B, 1, d]; writes the cache."""
        b, _, d = x.shape
        q, k, v = self.qkv(x).view(b, 1, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(b, 1, d))


class DecodingBlock(nn.Module):
    """Pre-norm attention with a cache, and MLP."""

    def __init__(self, d: int, heads: int, batch: int, context: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(d), CachedAttention(d, heads, batch, context)
        self.norm2, self.mlp = nn.LayerNorm(d), MLP(d)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """x [B, 1, d] -> [B, 1, d]."""
        x = x + self.attn(self.norm1(x), position, mask)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A GPT that reads one token of each sequence and says the next ones."""

    def __init__(self, d: int, layers: int, batch: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(context, d)
        self.h = nn.ModuleList(DecodingBlock(d, d // 128, batch, context) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.context = context

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """tokens [B, 1], position [1] int64 -> next tokens [B, 1]."""
        x = self.wte(tokens) + self.wpe(position)
        mask = (torch.arange(self.context, device=tokens.device) <= position)[None]
        for block in self.h:
            x = block(x, position, mask)
        return self.head(self.norm(x)).argmax(-1)


def arms() -> dict[str, Callable[[nn.Module], Any]]:
    """BF16 first; weights are quantized once and kept."""
    return {
        "bf16": partial(torch.compile, mode="reduce-overhead"),
        "fp8-exact": _graphed("fp8-exact", MLP_ONLY),
        "fp8-exact + attention": _graphed("fp8-exact", ATTENTION),
    }


def forward_arms() -> dict[str, Callable[[nn.Module], Any]]:
    """BF16 first; weights quantized at each call, or once and kept."""
    return {
        "bf16": partial(torch.compile, mode="reduce-overhead"),
        "fp8-exact": _graphed("fp8-exact", MLP_ONLY, cache=False),
        "fp8-exact, cache_weights": _graphed("fp8-exact", MLP_ONLY),
        "thinking-machines, cache_weights": _graphed("thinking-machines", MLP_ONLY),
    }


def _graphed(
    recipe: str, layers: list[dict[str, str]], cache: bool = True
) -> Callable[[nn.Module], Any]:
    policy = Policy.from_dict({"version": 1, "recipe": recipe, "layers": layers})
    options = {"policy": policy, "cache_weights": cache, "triton.cudagraphs": True}
    return partial(torch.compile, backend="fp4", options=options)


def forward_step(
    compile_model: Callable[[nn.Module], Any], d: int, tokens: int
) -> Callable[[], object]:
    """The forward pass of a BF16 MLP on x [tokens, d]."""
    torch.manual_seed(0)
    compiled = compile_model(MLP(d).to("cuda", torch.bfloat16).eval())
    x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x)

    return step


def run_forward(widths: tuple[int, ...] = (2048, 4096, 8192), tokens: int = 128) -> dict:
    """The table of an MLP's forward pass as a dict."""
    result = {"bench": "forward", **header(), "tokens": tokens, "rows": []}
    for d in widths:
        for name, arm in forward_arms().items():
            row = measure(partial(forward_step, arm, d, tokens))
            result["rows"].append({"d": d, "arm": name, **row})
    return with_ratios(result, "d")


def decoding_step(
    compile_model: Callable[[nn.Module], Any], d: int, layers: int, batch: int, context: int
) -> Callable[[], object]:
    """The next token of each of ``batch`` sequences."""
    torch.manual_seed(0)
    model = Decoder(d, layers, batch, context, 32768).to("cuda", torch.bfloat16).eval()
    compiled = compile_model(model)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
    position = torch.zeros(1, dtype=torch.int64, device="cuda")

    @torch.no_grad()
    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        tokens.copy_(compiled(tokens, position))
        position.add_(1).remainder_(context)

    return step


def run(
    d: int = 2048, layers: int = 12, batches: tuple[int, ...] = (1, 16), context: int = 1024
) -> dict:
    """The table as a dict."""
    sizes = {"width": d, "layers": layers, "context": context}
    result = {"bench": "decode", **header(), **sizes, "rows": []}
    for batch in batches:
        for name, arm in arms().items():
            row = measure(partial(decoding_step, arm, d, layers, batch, context))
            result["rows"].append({"batch": batch, "arm": name, **row})
    return with_ratios(result, "batch")
