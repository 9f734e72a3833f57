"""A training loop with accelerate: compile the model before ``prepare``.

    pip install -e '.[trainers]'
    accelerate launch examples/accelerate_loop.py

``Accelerator(dynamo_backend="fp4")`` does not work: accelerate has a closed list of backends.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fp4compile as fp4


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main(compiler: str = "inductor", epochs: int = 3) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    loader = DataLoader(TensorDataset(x, x.roll(1, dims=1)), batch_size=32)
    model = nn.Sequential(*(Residual(64) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.compile(backend="fp4", options={"compiler": compiler})

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    model = accelerator.unwrap_model(model)
    accelerator.print(fp4.explain(model))
    return model, losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
