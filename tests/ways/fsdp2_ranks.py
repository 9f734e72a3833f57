"""FSDP2 on two ranks: blocks of different precision, whole models, distributed checkpoints."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from backend_models import Net, batch, policy, precision_warnings, schemes
from ranks import WORLD, report
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp4compile as fp4
from fp4compile.blocks import clean_name

EAGER = {"backend": "fp4", "options": {"compiler": "eager"}}
POLICY = policy(
    default="low",
    layers=[
        {"match": "head", "scheme": "original"},
        {"blocks": "first 1", "scheme": "original"},
        {"blocks": "last 1", "scheme": "mxfp8"},
    ],
)


def shard(net, **extra):
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **extra)
    return fully_shard(net, mesh=mesh, **extra)


def compile_blocks(net):
    for block in net.blocks:
        block.compile(**EAGER)
    return net


def wrap_blocks(net):
    for i, block in enumerate(net.blocks):
        net.blocks[i] = torch.compile(block, **EAGER)
    return net


def checkpoint_blocks(net):
    for i, block in enumerate(net.blocks):
        net.blocks[i] = checkpoint_wrapper(block)
    return net


def run(net, call, rank, seed=5):
    """Output and, gathered, the gradients of one step."""
    torch.manual_seed(seed)
    out = call(batch(seed=rank))
    out.square().mean().backward()
    full = {clean_name(n): p.grad for n, p in net.named_parameters()}
    return out.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in full.items()}


def expected(net, whole):
    """The first rank's output, and the mean of the ranks' gradients, in one process."""
    torch._dynamo.reset()
    fp4.apply(net, POLICY)
    call = torch.compile(net, **EAGER) if whole else compile_blocks(net)
    outs, grads = [], []
    for rank in range(WORLD):
        net.zero_grad(set_to_none=True)
        out, grad = run(net, call, rank)
        outs.append(out)
        grads.append(grad)
    return outs, {n: torch.stack([g[n] for g in grads]).mean(0) for n in grads[0]}


def case(build, whole=False):
    """One step of ``build(stamped net)`` against a single process."""

    def step(rank, folder):
        net = Net(4)
        alone = copy.deepcopy(net)
        with precision_warnings() as texts:
            fp4.apply(net, POLICY)
            call = build(net)
            with fp4.monitor(net, csv=folder / "health.csv") as monitor:
                out, grads = run(net, call, rank)
        ran = schemes(net)
        weights = {clean_name(n).removesuffix(".weight"): w for n, w in alone.named_parameters()}
        read = {
            layer: (operands["fprop.weight"]["rms"], weights[layer].detach().square().mean().sqrt().item())
            for layer, operands in monitor.as_dict().get(0, {}).items()
            if "wgrad.gradient" in operands
        }
        outs, mean = expected(alone, whole)
        return {
            "schemes": ran, "warnings": texts, "forward": torch.equal(out, outs[rank]),
            "gradients": {n: torch.equal(g, mean[n]) for n, g in grads.items()},
            "read": read, "unseen": monitor.unseen, "files": sorted(p.name for p in folder.glob("*.csv")),
        }  # fmt: skip

    return step


def mixed(rank, folder):
    """FSDP hands BF16 copies of the parameters to the blocks: these are what is quantized."""
    net = Net(4)
    low = copy.deepcopy(net).to(torch.bfloat16)
    fp4.apply(net, POLICY)
    shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    out, grads = run(net, compile_blocks(net), rank)
    fp4.apply(low, POLICY)
    wanted = compile_blocks(low)(batch(seed=rank).bfloat16())
    return {
        "forward": torch.equal(out, wanted),
        "gradients": {str(g.dtype) for g in grads.values() if g.isfinite().all()},
    }


def trainer(seed):
    torch.manual_seed(seed)
    net = Net(2)
    fp4.apply(net, POLICY)
    compile_blocks(shard(net))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net, optimizer, steps):
    for step in steps:
        net(batch(seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpoint(rank, folder):
    """A model that was loaded takes the next steps of the model that was saved."""
    net, optimizer = trainer(0)
    torch.manual_seed(7 + rank)
    train(net, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "dcp")
    noise = torch.get_rng_state()
    train(net, optimizer, range(2, 4))

    other, other_optimizer = trainer(1)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_state_dict(
        other, other_optimizer,
        model_state_dict=state["model"], optim_state_dict=state["optimizer"],
    )  # fmt: skip
    torch.set_rng_state(noise)
    train(other, other_optimizer, range(2, 4))
    pairs = list(zip(net.parameters(), other.parameters()))
    same = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    torch.set_rng_state(noise)
    train(net, optimizer, [4])
    torch.manual_seed(99)
    train(other, other_optimizer, [4])
    noisy = any(not torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    return {"same": same, "noise matters": noisy, "keys": sorted(state["model"])}


def explained(rank, folder):
    """Example inputs run a sharded model, which all ranks do together."""
    net = Net(4)
    fp4.apply(net, POLICY)
    report = fp4.explain(shard(net), (batch(),))
    return {row.fqn: row.scheme_name for row in report if row.status == "rewritten"}


def caching(rank, folder):
    """FSDP writes parameters without counting: kept codes would be stale."""
    net = shard(Net(1))
    options = {"compiler": "eager", "cache_weights": True}
    try:
        torch.compile(net, backend="fp4", options=options)(batch())
    except fp4.PolicyError as error:
        return {"error": str(error)}
    return {"error": ""}


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(
        {
            "compiled after": case(lambda net: compile_blocks(shard(net))),
            "wrapped before": case(lambda net: shard(wrap_blocks(net))),
            "whole": case(lambda net: torch.compile(shard(net), **EAGER), whole=True),
            "compiled before, checkpointed": case(
                lambda net: shard(compile_blocks(checkpoint_blocks(net)))
            ),
            "mixed": mixed,
            "checkpoint": checkpoint,
            "explained": explained,
            "caching": caching,
        }
    )
    assert not dist.is_initialized()
