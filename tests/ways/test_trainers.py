"""The examples for trainers: short, and each trains in the policy's precision."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backend_models import Net, batch, schemes

import fp4compile as fp4

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["ddp", "fsdp2", "hf_trainer", "lightning_fit", "accelerate_loop"]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_read_in_one_sitting(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


def test_hugging_faces_trainer(example):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    trainer = example("hf_trainer").main("eager")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    found = schemes(trainer.model)
    assert found.pop("lm_head") == "left" and len(found) == 8
    rules = {row.fqn: row.rule for row in fp4.explain(trainer.model)}
    assert all("from step 15" in rules[name] for name in found), "the last phase"


def test_hugging_faces_switch_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # some versions write it
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="(?i)fp4.*DynamoBackend"):
        args = transformers.TrainingArguments(torch_compile_backend="fp4", report_to=[])
        transformers.Trainer(torch.nn.Linear(2, 2), args)


def test_lightning(example):
    pytest.importorskip("lightning")
    model = example("lightning_fit").main("eager")
    found = schemes(model)
    assert len(found) == 12 and found["blocks.0.up"] == "low" and found["blocks.5.up"] == "mxfp8"


def test_accelerate(example):
    pytest.importorskip("accelerate")
    model, losses = example("accelerate_loop").main("eager")
    assert losses[-1] < 0.8 * losses[0] and len(losses) == 24
    assert set(schemes(model).values()) == {"low", "mxfp8"}


def test_accelerates_switch_is_refused_and_a_wrapped_model_works():
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="(?i)fp4.*DynamoBackend"):
        accelerate.Accelerator(dynamo_backend="fp4")
    net = Net(1)
    call = torch.compile(net, backend="fp4", options={"compiler": "eager"})
    accelerator = accelerate.Accelerator()
    prepared = accelerator.prepare(call)
    accelerator.backward(prepared(batch()).square().mean())
    assert schemes(net)["blocks.0.mlp.up"] == "low"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_torchrun(name):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*run, str(EXAMPLES / f"{name}.py"), "eager"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 10 and losses[-1] < 0.6 * losses[0]
    assert "rewritten" in done.stdout and "mxfp8" in done.stdout and "ran outside" not in done.stderr
