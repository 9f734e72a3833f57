"""Small models in the spellings that real code has."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    def __init__(self, bias=True, act="gelu", p=0.0, between=None):
        super().__init__()
        self.up = nn.Linear(32, 64, bias=bias)
        self.act = ACTS[act] if isinstance(act, str) else act
        self.drop = nn.Dropout(p)
        self.between = between or (lambda h: h)
        self.down = nn.Linear(64, 32, bias=bias)

    def forward(self, x):
        return self.down(self.between(self.drop(self.act(self.up(x)))))


class Gated(nn.Module):
    def __init__(self, act=F.silu, order="gate*up", bias=False):
        super().__init__()
        self.gate = nn.Linear(32, 64, bias=bias)
        self.up = nn.Linear(32, 64, bias=bias)
        self.down = nn.Linear(64, 32, bias=bias)
        self.act, self.order = act, order

    def forward(self, x):
        gate, up = self.act(self.gate(x)), self.up(x)
        return self.down(gate * up if self.order == "gate*up" else up * gate)


class FusedGated(nn.Module):
    """Gate and up as one linear; ``halves`` takes them from its output."""

    def __init__(self, halves=lambda z: z.chunk(2, dim=-1), act=F.silu, bias=False, conv1d=False):
        super().__init__()
        self.gate_up = Conv1D(128, 32) if conv1d else nn.Linear(32, 128, bias=bias)
        self.down = nn.Linear(64, 32, bias=bias)
        self.halves, self.act = halves, act

    def forward(self, x):
        gate, up = self.halves(self.gate_up(x))
        return self.down(self.act(gate) * up)


class Conv1D(nn.Module):
    """Hugging Face's Conv1D: a linear with a [K, N] weight, through a 2-D addmm."""

    def __init__(self, n, k):
        super().__init__()
        self.n = n
        self.weight = nn.Parameter(torch.randn(k, n) / 8)
        self.bias = nn.Parameter(torch.randn(n) / 8)

    def forward(self, x):
        size = x.size()[:-1] + (self.n,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size)


class NewGELU(nn.Module):
    def forward(self, x):
        c = math.sqrt(2.0 / math.pi)
        return 0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2MLP(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(64, 32), Conv1D(32, 64)
        self.act, self.dropout = NewGELU(), nn.Dropout(p)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn, self.mlp = Attention(), MLP(act="gelu_tanh")

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Blocks(nn.Module):
    def __init__(self, n=2, make=MLP):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(n))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def relu_(x):
    return F.relu(x, inplace=True)


ACTS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
# (how it is written, the activation it is)
SPELLINGS = {
    "F.gelu": (F.gelu, "gelu"),
    "nn.GELU": (nn.GELU(), "gelu"),
    "erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "erf 2": (lambda x: 0.5 * (x * (torch.erf(x * 0.7071067811865476) + 1)), "gelu"),
    "F.gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
    "NewGELU": (NewGELU(), "gelu_tanh"),
    "FastGELU": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        "gelu_tanh",
    ),
    "in float32": (lambda x: F.gelu(x.float(), approximate="tanh").type_as(x), "gelu_tanh"),
    "F.relu": (F.relu, "relu"),
    "torch.relu": (torch.relu, "relu"),
    "x.relu": (lambda x: x.relu(), "relu"),
    "relu inplace": (relu_, "relu"),
    "x.relu_": (lambda x: x.relu_(), "relu"),
    "clamp": (lambda x: x.clamp(min=0), "relu"),
    "relu.square": (lambda x: F.relu(x).square(), "relu2"),
    "relu.pow": (lambda x: torch.relu(x).pow(2), "relu2"),
    "relu**2": (lambda x: torch.relu(x) ** 2, "relu2"),
    "r*r": (lambda x: (lambda r: r * r)(F.relu(x)), "relu2"),
    "F.silu": (F.silu, "silu"),
    "QuickGELU": (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
    "x*sigmoid": (lambda x: x * torch.sigmoid(x), "silu"),
    "x/(1+exp)": (lambda x: x / (1 + torch.exp(-x)), "silu"),
}
