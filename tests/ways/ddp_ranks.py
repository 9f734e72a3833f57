"""DDP on two ranks with two buckets of gradients, whose border is inside of an MLP."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.distributed as dist
from backend_models import Net, batch, policy, precision_warnings, schemes
from ranks import WORLD, report
from torch.nn.parallel import DistributedDataParallel as DDP

import fp4compile as fp4
from fp4compile import backend

D = 128  # a block has 0.33 MB of FP32 parameters, DDP's smallest bucket 1 MB
EAGER = {"compiler": "eager"}
BY_BLOCK = fp4.Policy.from_dict(policy(
    default="low",
    layers=[{"blocks": "first 1", "scheme": "original"}, {"blocks": "last 1", "scheme": "mxfp8"}],
))  # fmt: skip


def ddp(net):
    return DDP(net, bucket_cap_mb=1)


def outside(net, options):
    return torch.compile(ddp(net), backend="fp4", options=options)


def inside_stamped(net, options):
    fp4.apply(net, options["policy"])
    return ddp(torch.compile(net, backend="fp4", options=EAGER))


def by_block(net, options):
    """The options repeat the policy of the stamps, which is allowed."""
    fp4.apply(net, options["policy"])
    for block in net.blocks:
        block.compile(backend="fp4", options=options)
    return ddp(net)


def one_step(net, call, rank, seed=5):
    net.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    out = call(batch(4, 8, D, seed=rank))
    out.square().mean().backward()
    return out.detach(), {n: p.grad.clone() for n, p in net.named_parameters()}


def mean_of_ranks(net, call, seed):
    """Outputs and mean gradients of the ranks' batches, in one process."""
    steps = [one_step(net, call, rank, seed) for rank in range(WORLD)]
    grads = [grads for _, grads in steps]
    return [out for out, _ in steps], {n: sum(g[n] for g in grads) / WORLD for n in grads[0]}


def gap(one, other):
    return {n: ((one[n] - other[n]).norm() / other[n].norm()).item() for n in one}


@functools.cache
def alone(blocks, given):
    """What one process computes: the ranks' outputs, mean gradients, and these by other draws."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(6, D)
    fp4.apply(net, given)
    if blocks:
        for block in net.blocks:
            block.compile(backend="fp4", options=EAGER)
    call = net if blocks else torch.compile(net, backend="fp4", options=EAGER)
    return *mean_of_ranks(net, call, 5), mean_of_ranks(net, call, 6)[1]


def case(build, given=BY_BLOCK):
    options = {**EAGER, "policy": given}

    def step(rank, folder):
        net, counts, original = Net(6, D), [], backend.compile_graph

        def counting(gm, *args):
            targets = [str(node.target) for node in gm.graph.nodes]
            counts.append(sum("linear_act_linear" in target for target in targets))
            return original(gm, *args)

        backend.compile_graph = counting
        with precision_warnings() as texts:
            out, grads = one_step(net, build(net, options), rank)
        backend.compile_graph = original
        blocks = build is by_block
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outs, mean, other = alone(blocks, given)
        return {
            "schemes": {} if blocks else schemes(net), "chains": counts, "warnings": texts,
            "rows": {} if blocks else {r.fqn: (r.reason, r.chain) for r in fp4.explain(net)},
            "forward": torch.equal(out, outs[rank]), "gap": gap(grads, mean),
            "noise": gap(other, mean),
        }  # fmt: skip

    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(
        {
            "outside": case(outside),
            "inside, stamped": case(inside_stamped),
            "by block": case(by_block),
            "default policy": case(outside, given=fp4.Policy.default()),
        }
    )
    assert not dist.is_initialized()
