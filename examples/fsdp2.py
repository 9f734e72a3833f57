"""Train with FSDP2, one graph a block: stamp the whole model, then compile and shard each block.

    torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))  # also sets the rank's device
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(6))).to(kind)
    fp4.apply(model, fp4.Policy.default())  # a block by itself has neither its name nor its place
    for block in model:
        block.compile(backend="fp4", options={"compiler": compiler})
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + dist.get_rank())  # each rank its own data and its own rounding noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(64, WIDTH, device=kind)
        loss = F.mse_loss(model(x), x.roll(1, dims=1))
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
