"""Train a small GPT-2 with Hugging Face's Trainer: compile the model in place, before the Trainer.

    pip install -e '.[trainers]' && python examples/hf_trainer.py

``TrainingArguments(torch_compile_backend="fp4")`` does not work: accelerate, which compiles for the
Trainer, has a closed list of backends.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import fp4compile as fp4

POLICY = fp4.Policy.parse(
    """
version: 1
recipe: fp8-exact
layers:
  - {match: "*.attn.*", scheme: mxfp8}
phases:
  - {from_step: 15, fprop: original}
"""
)


class Phases(TrainerCallback):
    """Tells the layers where the run is: needed for policies with phases only."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        fp4.apply(model, POLICY, step=state.global_step)


def main(compiler: str = "inductor", steps: int = 20) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=64, n_positions=32,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    fp4.apply(model, POLICY)
    model.compile(backend="fp4", options={"compiler": compiler})
    lines = [(torch.arange(32) + k) % 64 for k in range(64)]
    data = [{"input_ids": line, "labels": line} for line in lines]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=3e-3,
            logging_steps=5, save_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=data, callbacks=[Phases()])
        trainer.train()
    print(fp4.explain(model).summary())
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:2])
