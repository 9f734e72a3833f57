"""Train with Lightning: give the compiled module to ``Trainer.fit``.

    pip install -e '.[trainers]' && python examples/lightning_fit.py
"""

from __future__ import annotations

import sys

import lightning
import torch
import torch.nn.functional as F
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


class Regression(lightning.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(compiler: str = "inductor", steps: int = 20) -> Regression:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    loader = DataLoader(TensorDataset(x, x.roll(1, dims=1)), batch_size=32)
    model = Regression()
    compiled = torch.compile(model, backend="fp4", options={"compiler": compiler})
    trainer = lightning.Trainer(
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(compiled, loader)
    print(fp4.explain(model))
    return model


if __name__ == "__main__":
    main(*sys.argv[1:2])
