"""Train on several devices with DDP: compile the wrapped model, as with any backend.

    torchrun --nproc-per-node 2 examples/ddp.py

DDP cuts the compiled graph into buckets of gradients. A chain that a cut goes through runs as
single linears in the same precision; the report says which.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp4compile as fp4

WIDTH = 128


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main(compiler: str = "inductor", steps: int = 10) -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(6))).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    compiled = torch.compile(ddp, backend="fp4", options={"compiler": compiler})
    torch.manual_seed(1 + dist.get_rank())  # each rank its own data and its own rounding noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(64, WIDTH, device=device)
        loss = F.mse_loss(compiled(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(fp4.explain(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2])
