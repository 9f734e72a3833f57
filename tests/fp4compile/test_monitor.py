"""`fp4.monitor`: what was planted is found by name, steps between run nothing more, nothing is
compiled again, and what cannot be sampled is said."""

from __future__ import annotations

import csv
import math
import sys

import pytest
import torch
from backend_models import (
    Broken,
    Checkpointed,
    D,
    Mlp,
    Net,
    batch,
    compiled,
    policy,
    precision_warnings,
)
from fp4compile.kernels import health, observing, ops, reference
from fp4compile.kernels.formats import TensorFormat
from torch import nn

import fp4compile as fp4

assert ops  # defines torch.ops.fp4
pytestmark = pytest.mark.usefixtures("fresh")
ALL = policy(recipe="fp8-exact", default="low")


def train(net, call, steps=1, x=None, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.0)
    for i in range(steps):
        call(batch(seed=i) if x is None else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def watched(net, x=None, given=ALL, **keys):
    with fp4.monitor(net, **keys) as monitor:
        train(net, compiled(net, given), 1, x)
    return monitor.as_dict()[0]


def measured(name, args, out, rows=1000):
    """What a step's end makes of a primitive, whose memory has other contents by then."""
    args, out = ([t.clone() if isinstance(t, torch.Tensor) else t for t in part] for part in (args, out))
    made = health.quantizations(name, tuple(args), tuple(out), health.Rows(rows))
    for t in (*args, *out):
        if isinstance(t, torch.Tensor):
            t.view(torch.uint8).fill_(77) if t.numel() else t
    health.measure(made)
    return made


# figures ------------------------------------------------------------------------------------------


PLAIN = (
    "nvfp4:row:fp8_exact:half", "nvfp4:tensor:tile", "nvfp4:tensor:had16", "nvfp4:row:four_over_six",
    "mxfp8:32", "mxfp8:row", "mxfp4", "s2f6:had32",
)  # fmt: skip
BLOCK_SCALED = [
    ("fp8:128", "e4m3"), ("fp8:tile", "e4m3"), ("nvfp4:row:fp8_exact:half", "fp4"),
    ("nvfp4:tensor:fp8_exact", "mx"), ("mxfp8:32", "mx"), ("mxfp8:row", "mx"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "operand", "transpose"),
    [*((t, "f32", False) for t in PLAIN), *((t, "none", True) for t in PLAIN),
     *((t, f, False) for t, f in BLOCK_SCALED)],
)  # fmt: skip
def test_figures_are_those_of_the_whole_tensor(text, operand, transpose):
    fmt, x = TensorFormat.parse(text), torch.randn(48, 80)
    x[3, :16] *= 1e-4
    out = torch.ops.fp4.quantize(x, text, operand, transpose)
    (made,) = measured("quantize", (x, text, operand, transpose), out)
    m = x.t() if transpose else x
    decoded = reference.dequantize(*reference.quantize(m, fmt), fmt, m.shape[1])
    sums = dict(zip(health.SUMS, made.sums.tolist()))
    assert made.sampled == m.numel() and (made.rows, made.columns) == tuple(m.shape)
    assert sums["off"] / sums["size"] == pytest.approx(float((decoded - m).norm() / m.norm()), rel=1e-4)
    if not fmt.rotation:
        assert sums["zeros"] == ((decoded == 0) & (m != 0)).sum()
        assert sums["amax"] == m.abs().max()
    assert sums["nan_rows"] == 0


@pytest.mark.parametrize(("text", "form"), [
    ("mxfp8:32:sr", "f32"), ("mxfp8:row:sr", "f32"), ("nvfp4:tensor:sr:had16", "f32"),
    ("mxfp4:sr", "f32"), ("mxfp8:32:sr", "mx"), ("mxfp8:row:sr", "mx"), ("nvfp4:tensor:sr", "fp4"),
    ("fp8:128:sr", "e4m3"),
])  # fmt: skip
def test_figures_of_gradients_in_both_orientations(text, form):
    g, seed = torch.randn(64, 96), torch.tensor([5])
    fold = torch.rand(64) + 0.5
    args = (g, fold, text, text, form, form, False, seed, 0)
    out = torch.ops.fp4.quantize_grad(*args)
    d, w = measured("quantize_grad", args, out)
    want = 0.15 if "fp4" in text else 0.038
    for made in (d, w):
        off, size, *_ = made.sums.tolist()
        assert off / size == pytest.approx(want, rel=0.25)
    assert d.sums[1] == pytest.approx(float(g.norm()), rel=1e-5)
    assert w.sums[1] == pytest.approx(float((g * fold[:, None]).norm()), rel=1e-5)
    g[7, 3] = math.nan
    out = torch.ops.fp4.quantize_grad(*args)
    d, w = measured("quantize_grad", args, out)
    assert d.sums[5] == (64 if "nvfp4" in text else 1) and w.sums[5] >= 1


def test_rows_of_what_is_never_stored_are_made_again():
    """Hidden activations and gradients from affine terms, gated ones too."""
    m, n = 64, 96
    draw = torch.Generator().manual_seed(1)

    def term(bias=True):
        acc, row, col, b = (torch.rand(s, generator=draw) - 0.3 for s in ((m, n), m, n, n))
        return [acc.bfloat16(), row, col, b] if bias else [acc.bfloat16(), row, col]

    def value(acc, row, col, bias=None):
        z = acc.double() * row[:, None] * col
        return z if bias is None else z + bias

    g, a, b = term(False), term(), term()
    z, up, dh, fold = value(*a), value(*b), value(*g), torch.rand(m, generator=draw)
    forward = "mxfp8:32"
    sides = ("mxfp8:32:sr", "mxfp8:32:sr"), ("f32", "f32"), (torch.tensor([5]), 0)

    def silu_slope(x):
        return x.sigmoid() * (1 + x * (1 - x.sigmoid()))

    h = z * z.sigmoid()
    dz, da, db = dh * silu_slope(z), dh * up * silu_slope(z), dh * h
    cases = [
        ("act_quantize", [*a, "silu", forward, "f32"], [h]),
        ("glu_quantize", [*a, *b, "silu", forward, "f32"], [h * up]),
        ("act_grad_quantize", [*g, *a, "silu", fold, *sides[0], *sides[1], False, *sides[2]],
         [dz, dz * fold[:, None]]),
        ("glu_grad_quantize",
         [*g, *a, *b, "silu", fold, None, *sides[0] * 2, *sides[1] * 2, False, False, *sides[2]],
         [da, da * fold[:, None], db, db]),
    ]  # fmt: skip
    for name, args, wanted in cases:
        out = getattr(torch.ops.fp4, name)(*args)
        found = measured(name, args, out)
        assert len(found) == len(wanted)
        for made, want in zip(found, wanted):
            off, size, *_ = made.sums.tolist()
            assert size == pytest.approx(float(want.norm()), rel=1e-5), name
            assert 0.01 < off / size < 0.05, name


def test_a_nan_that_a_quantizer_swallows_is_seen():
    x = torch.randn(48, 80)
    out = torch.ops.fp4.quantize(x, "mxfp8:32", "f32", False)
    x[3, 5] = math.nan
    (made,) = measured("quantize", (x, "mxfp8:32", "f32", False), out)
    assert made.sums[:2].isnan().all()


def test_rows_that_are_not_finite_are_left_out_of_the_figures():
    x = torch.randn(48, 80)
    want = measured("quantize", (x, "mxfp8:row", "f32", False), torch.ops.fp4.quantize(x, "mxfp8:row", "f32", False))
    spoilt = torch.cat([x, x])
    spoilt[48:, 5] = torch.inf
    out = torch.ops.fp4.quantize(spoilt, "mxfp8:row", "f32", False)
    (made,) = measured("quantize", (spoilt, "mxfp8:row", "f32", False), out)
    torch.testing.assert_close(made.sums[:2], want[0].sums[:2])
    assert made.sums[5] == 48


def test_rows_are_a_sample_at_even_distances():
    cpu = torch.device("cpu")
    assert [len(health.Rows(10, turn).of(100, cpu)) for turn in (0, 7, 13)] == [10, 10, 10]
    assert health.Rows(10, 3).of(100, cpu).tolist() == list(range(3, 100, 10))
    assert len(health.Rows(10, 9).of(5, cpu)) == 5
    x = torch.ones(64, 32)
    x[1::2] = 0
    out = torch.ops.fp4.quantize(x, "mxfp8:32", "f32", False)
    (made,) = measured("quantize", (x, "mxfp8:32", "f32", False), out, 32)
    assert made.sums[1] == 32 and made.sampled == 32 * 32


# what was planted ---------------------------------------------------------------------------------


def test_every_operand_of_every_layer_has_a_reading():
    found = watched(Net(2), torch.randn(4, 8, D, requires_grad=True))
    layers = {f"blocks.{i}.{n}" for i in (0, 1) for n in ("attn", "mlp.up", "mlp.down")} | {"head"}
    assert set(found) == layers
    for operands in found.values():
        assert list(operands) == ["fprop.activation", "fprop.weight", "dgrad.gradient", "wgrad.gradient"]
        assert 0.08 < operands["fprop.activation"]["error"] < 0.11
        assert 0.03 < operands["dgrad.gradient"]["error"] < 0.045


def test_operands_quantized_from_the_input_and_layers_without_dgrad_are_named():
    found = watched(Net(1), given=policy(recipe="nvidia", default="low"))
    assert set(found) == {"blocks.0.attn", "blocks.0.mlp.up", "blocks.0.mlp.down", "head"}
    assert "dgrad.gradient" not in found["blocks.0.attn"]  # the input needs no gradient
    assert all("wgrad.activation" in operands for operands in found.values())
    assert found["blocks.0.attn"]["wgrad.gradient"]["format"] == "nvfp4:tensor:sr:had16"


def test_a_planted_nan_row_is_found_where_it_is():
    net, x = Net(1), batch(2, 8, D)
    x[1, 3, 5] = math.nan
    found = watched(net, x)
    assert found["blocks.0.attn"]["fprop.activation"]["nan_rows"] == 1
    assert found["blocks.0.attn"]["fprop.activation"]["rows"] == 16
    assert found["blocks.0.attn"]["fprop.weight"]["nan_rows"] == 0
    clean = watched(Net(1), batch(2, 8, D))
    assert all(o["nan_rows"] == 0 for operands in clean.values() for o in operands.values())


def test_planted_zeros_and_saturation_are_found_by_name():
    torch.manual_seed(0)
    net = Net(2)
    with torch.no_grad():
        net.blocks[1].mlp.up.weight[:, ::16] = 1000  # beside them the others vanish
        # A block of which the scale is rounded from 1.4 to 1 smallest steps: 6 to 8.4 are cut to 6.
        weight = net.blocks[0].attn.weight
        weight.fill_(8.3 / 2688 * 2**-9)
        weight[:, :16] = 0
        weight[0, 0] = 1.0
    given = policy(
        recipe="fp8-exact", layers=[{"match": "*", "scheme": "mine"}],
        schemes={"mine": {"fprop": {"activation": {"format": "nvfp4"}, "weight": {"format": "nvfp4"}},
                          "dgrad": "original", "wgrad": "original"}},
    )  # fmt: skip
    found = watched(net, given=given)
    weights = {layer: operands["fprop.weight"] for layer, operands in found.items()}
    assert weights["blocks.1.mlp.up"]["zeros"] == pytest.approx(15 / 16)
    assert weights["blocks.0.attn"]["saturated"] == pytest.approx(0.5, abs=0.01)
    for layer, figures in weights.items():
        assert figures["zeros"] < 0.1 or layer == "blocks.1.mlp.up"
        assert figures["saturated"] == 0 or layer == "blocks.0.attn"


def test_gradient_scale_is_that_of_the_loss():
    readings = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        net = Net(1)
        with fp4.monitor(net) as monitor:
            (compiled(net, ALL)(batch()) * scale).sum().backward()
        readings.append(monitor.as_dict()[0]["blocks.0.mlp.down"]["dgrad.gradient"])
    assert readings[1]["rms"] == pytest.approx(1024 * readings[0]["rms"], rel=0.2)
    assert readings[1]["amax"] > 500 * readings[0]["amax"]


# names --------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """q, k and v read one input; Dynamo compiles this once for every block."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x):
        return x + self.q(x) * self.k(x) + self.v(x)


@pytest.mark.parametrize("recipe", ["fp8-exact", "thinking-machines", "nvidia", "mxfp4"])
def test_blocks_that_share_a_graph_and_an_input_keep_their_names(graphs, recipe):
    """The weights of block i have the size 2^i, those of q, k, v 1, 3, 5 times that."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Heads() for _ in range(3)))
    base = {}
    with torch.no_grad():
        for i, block in enumerate(net):
            for j, name in enumerate("qkv"):
                base[f"{i}.{name}"] = (1 + 2 * j) * 2.0**i / 1000
                getattr(block, name).weight.normal_().mul_(base[f"{i}.{name}"])
    fp4.apply(net, policy(recipe=recipe, layers=[{"match": "*", "scheme": "low"}]))
    for block in net:
        block.compile(backend="fp4", options={"compiler": "aot_eager"})
    with fp4.monitor(net) as monitor:
        train(net, net, 1, torch.randn(4, 8, D, requires_grad=True))
    assert graphs.count == 1
    found = monitor.as_dict()[0]
    assert set(found) == set(base)
    for layer, operands in found.items():
        assert operands["fprop.weight"]["rms"] == pytest.approx(base[layer], rel=0.1)
        assert {"dgrad.gradient", "wgrad.gradient"} <= set(operands)


def test_the_graphs_of_aot_are_sampled_and_not_compiled_again(graphs):
    net = Mlp()
    call = compiled(net, ALL, "aot_eager")
    x = torch.randn(8, D, requires_grad=True)
    train(net, call, 1, x)
    with fp4.monitor(net) as monitor:
        train(net, call, 1, x)
    found = monitor.as_dict()[0]
    assert graphs.count == 1 and set(found) == {"up", "down"} and not monitor.unseen
    assert all("dgrad.gradient" in operands for operands in found.values())


@pytest.mark.parametrize("kind", [Checkpointed, Broken])
def test_checkpointing_and_graph_breaks(kind):
    net = kind(2)
    found = watched(net)
    assert set(found) == {row.fqn for row in fp4.explain(net).rewritten} and len(found) >= 6
    assert all("wgrad.gradient" in operands for operands in found.values())


def test_gated_halves_are_two_parts():
    class Swiglu(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(2 * D, D, bias=False)

        def forward(self, x):
            gate, up = self.both(x).chunk(2, -1)
            return self.down(nn.functional.silu(gate) * up)

    net = Swiglu()
    call = compiled(net, ALL)
    with fp4.monitor(net) as monitor:
        train(net, call, 1, torch.randn(8, D, requires_grad=True))
    found = monitor.as_dict()[0]
    assert set(found) == {"both", "both[50%:]", "down"} and not monitor.unseen
    assert all("dgrad.gradient" in operands for operands in found.values())


def test_weights_that_are_kept_quantized_are_named():
    net = Net(1)
    options = {"policy": ALL, "compiler": "eager", "cache_weights": True}
    call = torch.compile(net, backend="fp4", options=options)
    with fp4.monitor(net, every=1) as monitor:
        for i in range(2):
            call(batch(seed=i)).square().mean().backward()
            monitor.step()
    found = monitor.as_dict()
    assert {layer for layer in found[1] if "fprop.weight" in found[1][layer]} == set(found[0])


def test_two_models_at_a_time_and_one_without_a_monitor():
    one, two, other = Net(1), Mlp(), Mlp()
    calls = [compiled(m, ALL) for m in (one, two, other)]
    with fp4.monitor(one) as first, fp4.monitor(two) as second:
        for model, call in zip((other, two, one), (calls[2], calls[1], calls[0])):
            train(model, call)
    assert set(first.as_dict()[0]) == {"blocks.0.attn", "blocks.0.mlp.up", "blocks.0.mlp.down", "head"}
    assert set(second.as_dict()[0]) == {"up", "down"}


# steps --------------------------------------------------------------------------------------------


def aten_calls(function):
    """How many operators of PyTorch ran, below the level of modes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(e.count for e in profile.key_averages() if e.key.startswith("aten::"))


def test_steps_between_run_nothing_more_and_nothing_is_compiled_again(graphs):
    net = Net(1)
    call = compiled(net, ALL)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    step = lambda: train(net, call, 1, batch(), optimizer)  # noqa: E731
    step()
    before = aten_calls(step)
    with fp4.monitor(net, every=3) as monitor:
        sampled, between = aten_calls(step), aten_calls(step)
        assert observing.observers == []
    assert between == before and sampled > before + 100
    assert graphs.count == 1 and {r.step for r in monitor.readings} == {0}
    assert aten_calls(step) == before


def test_sampled_steps_are_numbered_and_evaluation_is_not_sampled():
    net = Net(1)
    call = compiled(net, ALL)
    optimizers = [torch.optim.SGD(p, lr=0.0) for p in (net.blocks.parameters(), net.head.parameters())]
    with fp4.monitor(net, every=2, step=11) as monitor:
        for i in range(4):  # steps 11 to 14, two optimizers each
            with torch.no_grad():
                call(1000 * batch())
            for micro in (1, 100):
                call(micro * batch(seed=i)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                call(1000 * batch())
    found = monitor.as_dict()
    assert list(found) == [12, 14]
    first = found[12]["blocks.0.attn"]["fprop.activation"]
    assert first["amax"] == batch(seed=1).abs().max()  # of the first micro-batch


def test_a_phase_changes_what_is_read(graphs):
    net = Net(1)
    given = {**ALL, "phases": [{"from_step": 1, "fprop": "original"}]}
    fp4.apply(net, given, step=0)
    call = compiled(net, None)
    with fp4.monitor(net, every=1) as monitor:
        for step in (0, 1):
            fp4.apply(net, given, step=step)
            train(net, call, 1, torch.randn(4, 8, D, requires_grad=True))
    found = monitor.as_dict()
    assert list(found[0]["head"]) == ["fprop.activation", "fprop.weight", "dgrad.gradient", "wgrad.gradient"]
    assert list(found[1]["head"]) == ["dgrad.gradient", "wgrad.gradient", "dgrad.weight", "wgrad.activation"]


def test_training_has_the_same_bits():
    grads = []
    for every in (0, 1):
        torch.manual_seed(0)
        net = Net(1)
        monitor = fp4.monitor(net) if every else None
        torch.manual_seed(1)
        compiled(net, ALL)(batch()).square().mean().backward()
        grads.append([p.grad for p in net.parameters()] + [torch.rand(1)])
        if monitor:
            monitor.stop()
    assert all(torch.equal(a, b) for a, b in zip(*grads))


# what cannot be sampled ---------------------------------------------------------------------------


def test_layers_that_are_not_seen_are_named():
    net = Net(1)
    call = compiled(net, ALL)
    with precision_warnings() as texts, fp4.monitor(net, every=1, automatic=False) as monitor:
        monitor.step()
        monitor.step()
    assert texts == [
        "fp4.monitor: the layers were not sampled in step 0: no graph of this model was compiled"
        ' with backend="fp4"'
    ]
    train(net, call)
    with precision_warnings() as texts, fp4.monitor(net, automatic=False) as monitor:
        with torch.no_grad():
            call(batch())
        monitor.step()
    assert monitor.unseen == ["blocks.0.attn", "blocks.0.mlp.up", "blocks.0.mlp.down", "head"]
    assert len(texts) == 1 and "4 of 4 quantized layers were not sampled in step 0" in texts[0]


def test_layers_of_blocks_that_were_compiled_alone_and_phases_without_any():
    net = Net(2)
    given = {**ALL, "phases": [{"from_step": 1, "all": "original"}]}
    fp4.apply(net, given, step=0)
    for block in net.blocks:
        block.compile(backend="fp4", options={"compiler": "eager"})
    with precision_warnings() as texts, fp4.monitor(net, every=1) as monitor:
        train(net, lambda x: net.blocks[0](x))  # block 1 is not compiled yet
        train(net, net.blocks[1])
        train(net, lambda x: net.blocks[1](net.blocks[0](x)))
        fp4.apply(net, given, step=1)
        train(net, lambda x: net.blocks[1](net.blocks[0](x)))
    assert len(texts) == 1 and "3 of 6 quantized layers were not sampled in step 1" in texts[0]
    assert monitor.unseen == [] and list(monitor.as_dict()) == [0, 1, 2]


def test_cuda_graphs_are_refused_with_a_warning(monkeypatch):
    from fp4compile import backend

    monkeypatch.setattr(backend, "runs_as_cuda_graph", lambda *_: True)
    monkeypatch.setattr(backend, "compile_graph", lambda gm, *_: gm.forward)
    net = Net(1)
    call = compiled(net, ALL, "inductor")
    with precision_warnings() as texts, fp4.monitor(net, every=1) as monitor:
        train(net, call)
    assert "4 of 4" in texts[-1] and "step 0: CUDA graphs replay kernels" in texts[-1]
    assert monitor.readings == [] and str(monitor) == "fp4.monitor: nothing sampled yet"


def test_which_graphs_are_replayed():
    from fp4compile.backend import inductor_options, runs_as_cuda_graph

    class Cuda(torch.Tensor):
        is_cuda = True

    gpu, cpu = torch.ones(1).as_subclass(Cuda), torch.ones(1)
    assert runs_as_cuda_graph([gpu], inductor_options({}, "reduce-overhead"))
    assert runs_as_cuda_graph([gpu], {"triton.cudagraphs": True})
    assert not runs_as_cuda_graph([gpu], {}) and not runs_as_cuda_graph([cpu], {"triton.cudagraphs": True})


@pytest.mark.parametrize(
    ("keys", "text"),
    [({"every": 0}, "every=0: a whole number from 1 on"), ({"rows": 1.5}, "rows=1.5"), ({"step": -1}, "step=-1")],
)
def test_what_cannot_be_used_is_one_line(keys, text):
    with pytest.raises(fp4.InputError, match=text):
        fp4.monitor(Net(1), **keys)
    with pytest.raises(fp4.InputError, match="no parameters"):
        fp4.monitor(nn.GELU())
    assert observing.observers == []


# files --------------------------------------------------------------------------------------------


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value


def test_csv_tensorboard_and_table(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    net, writer = Net(1), Writer()
    call, path = compiled(net, ALL), tmp_path / "new" / "health.csv"
    for start in (0, 2):  # the second goes on in the same file
        with fp4.monitor(net, every=2, csv=path, tensorboard=writer, step=start) as monitor:
            train(net, call, 2)
    rows = list(csv.DictReader(path.open()))
    assert [r["step"] for r in rows] == ["0"] * (len(rows) // 2) + ["2"] * (len(rows) // 2)
    last = monitor.readings[-1]
    assert float(rows[-1]["error"]) == last.error == writer.scalars[f"fp4/{last.operand}/error/{last.layer}", 2]
    assert ("fp4/dgrad.gradient/saturated/head", 0) not in writer.scalars
    text = str(monitor)
    assert max(map(len, text.splitlines())) <= 80
    assert "blocks.0.mlp.up" in text and "step 2, 4 layers" in text


def test_each_process_has_its_own_file(tmp_path, monkeypatch):
    net, distributed = Net(1), torch.distributed
    for name, value in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 3)):
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    with fp4.monitor(net, csv=tmp_path / "health.csv"):
        train(net, compiled(net, ALL))
    assert [p.name for p in tmp_path.iterdir()] == ["health.rank3.csv"]


def test_a_missing_tensorboard_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(fp4.Fp4Error, match="pip install tensorboard"):
        fp4.monitor(Net(1), tensorboard=tmp_path)
    assert observing.observers == []
