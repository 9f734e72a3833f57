"""Ways to train one GPT, by name: this package's, plain PyTorch's and its peers'."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import fp4compile as fp4
from fp4compile.bench import arms

MLPS = arms.MLP_ONLY  # as in the article; all else is BF16
Build = Callable[[nn.Module], tuple[nn.Module, Any]]  # a model -> what is trained, what is called


def plain(compiled: bool) -> Build:
    """As it is."""

    def build(model: nn.Module) -> tuple[nn.Module, Any]:
        return model, torch.compile(model) if compiled else model

    return build


def policy_of(name: str) -> fp4.Policy:
    """The policy of an arm of this package."""
    if name == "fp8":  # 8 bits in all three GEMMs, with one power of two a row for Hopper's GEMM
        layers = [{"chain": "mlp", "scheme": "mxfp8"}]
        return fp4.Policy.from_dict({"version": 1, "recipe": "fp8-exact", "layers": layers})
    if name == "thinking-machines, nearest":
        return nearest("thinking-machines")
    return fp4.Policy.from_dict({"version": 1, "recipe": name, "layers": MLPS})


def nearest(recipe: str) -> fp4.Policy:
    """A recipe with every backward operand rounded to nearest."""
    text = files("fp4compile.recipes").joinpath(f"{recipe}.yaml").read_text()
    text = text.replace("rounding: stochastic", "rounding: nearest")
    return fp4.Policy.from_dict({**yaml.safe_load(text), "layers": MLPS})


def ours(name: str) -> Build:
    """The backend ``fp4`` under `policy_of`."""

    def build(model: nn.Module) -> tuple[nn.Module, Any]:
        return model, torch.compile(model, backend="fp4", options={"policy": policy_of(name)})

    return build


def torchao(recipe: str) -> Build:
    """torchao's float8 training of the MLPs, which it converts in place."""
    arm = arms.torchao(recipe, lambda name: ".mlp." in name)
    return lambda model: (model, arm(model))


# The recipe in ordinary PyTorch operations, quantized values kept in BF16: what one writes by hand.


def fake_nvfp4(x: Tensor) -> Tensor:
    """NVFP4 and back, one outer scale for the tensor, E4M3 block scales, to nearest."""
    blocks = x.float().unflatten(-1, (-1, 16))
    outer = blocks.abs().amax() / (448 * 6)
    scale = (blocks.abs().amax(-1, keepdim=True) / 6 / outer).to(torch.float8_e4m3fn).float()
    size = (blocks / (scale * outer).clamp(min=1e-30)).abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = (size / step).round() * step * blocks.sign()
    return (rounded * scale * outer).flatten(-2).to(torch.bfloat16)


def fake_mxfp8(x: Tensor) -> Tensor:
    """MXFP8 in blocks of 32 and back, rounded stochastically."""
    blocks = x.float().unflatten(-1, (-1, 32))
    power = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30))) - 8
    scaled = blocks * torch.exp2(-power)
    step = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2**-6))) - 3)
    rounded = (torch.floor(scaled / step + torch.rand_like(scaled)) * step).clamp(-448, 448)
    return (rounded * torch.exp2(power)).flatten(-2).to(torch.bfloat16)


class FakeProduct(torch.autograd.Function):
    """y = x w^T with quantized operands in all three products, each multiplied in BF16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        xq, wq = fake_nvfp4(x), fake_nvfp4(w)
        ctx.save_for_backward(xq, wq)
        return xq @ wq.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        xq, wq = ctx.saved_tensors
        g = grads[0]
        dx = fake_mxfp8(g) @ fake_mxfp8(wq.t().contiguous()).t()
        gt, xt = (fake_mxfp8(t.flatten(0, -2).t().contiguous()) for t in (g, xq))
        return dx, (gt @ xt.t()).float()


class FakeLinear(nn.Linear):
    """A linear without bias through `FakeProduct`."""

    def forward(self, x: Tensor) -> Tensor:
        return FakeProduct.apply(x.to(torch.bfloat16), self.weight)


def fake_quantized(model: nn.Module) -> tuple[nn.Module, Any]:
    """Each MLP's linears replaced by `FakeLinear`, compiled by Inductor."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.mlp.up.__class__ = block.mlp.down.__class__ = FakeLinear
    return model, torch.compile(model)


ARMS: dict[str, Build] = {
    "bf16": plain(True),
    "fp8": ours("fp8"),
    "thinking-machines": ours("thinking-machines"),
    "thinking-machines, nearest": ours("thinking-machines, nearest"),
    "fp8-exact": ours("fp8-exact"),
    "bf16 eager": plain(False),
    "torchao tensorwise": torchao("tensorwise"),
    "torchao rowwise": torchao("rowwise"),
    "torchao rowwise_with_gw_hp": torchao("rowwise_with_gw_hp"),
    "fake quantized": fake_quantized,
}
TRAINING = tuple(ARMS)[:5]
PEERS = ("bf16 eager", "bf16", *tuple(ARMS)[6:], "fp8-exact", "thinking-machines")
OURS = ("fp8", "thinking-machines", "thinking-machines, nearest", "fp8-exact")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean, in nats a byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
