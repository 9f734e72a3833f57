"""The report: one row for every linear, true bytes, reasons, and a model that is left as it was."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from backend_models import (
    Broken,
    Checkpointed,
    D,
    Disabled,
    Mlp,
    Net,
    Twice,
    aot,
    batch,
    compiled,
    policy,
    precision_warnings,
)
from fp4compile.passes.printer import saved_for_backward
from torch import nn

import fp4compile as fp4

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()
LOW = policy(default="low")


class Mixed(nn.Module):
    """A layer of every status."""

    def __init__(self):
        super().__init__()
        self.mlp, self.eager = Mlp(), Disabled()
        self.wide, self.unused = nn.Linear(D, D).double(), nn.Linear(D, D)
        self.excluded, self.last = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = self.mlp(x)
        x = self.wide(x.double()).float()
        return self.last(self.excluded(self.eager(x)))


GIVEN = policy(default="low", layers=[{"match": "excluded", "scheme": "original"}])


def test_every_linear_has_a_row_with_status_and_reason():
    report = fp4.explain(Mixed(), (X,), policy=GIVEN)
    found = {row.fqn: (row.status, row.reason) for row in report}
    assert len(report) == len(found) == 8
    assert found["mlp.up"] == found["mlp.down"] == ("rewritten", "")
    assert found["last"] == ("rewritten", "")
    assert found["excluded"] == ("left", '<dict>:4 match "excluded"')
    assert found["wide"][0] == "left" and "float64" in found["wide"][1]
    assert found["eager.up"][0] == "not compiled" and "without Dynamo" in found["eager.up"][1]
    assert found["unused"] == ("not compiled", "no captured graph reached it")
    assert report["wide"].refused and not report["excluded"].refused


def test_the_fields_of_a_row():
    report = fp4.explain(Net(1), (X,))
    row = report["blocks.0.mlp.up"]
    assert row.kind == "linear" and row.shape == "64×32" and row.scheme_name == "low"
    assert row.scheme.startswith("fprop(nvfp4") and row.chain == 0
    assert row.rule == "recipe fp8-exact: chain mlp" and row.engine == "reference"
    assert report["blocks.0.mlp.down"].chain == 0 and report["head"].chain is None
    assert report["head"].engine == "" and report["head"].scheme == "original"
    with pytest.raises(KeyError):
        report["no.such"]


def test_the_table(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    report = fp4.explain(Net(2), (X,))
    text = str(report)
    lines = text.splitlines()
    assert lines[0].split() == ["layer", "shape", "scheme", "chain", "kept", "status", "why"]
    assert [line.split()[-1] for line in lines[2:9]] == ["1", "2", "2", "1", "2", "2", "1"]
    assert sum("rewritten" in line for line in lines[2:9]) == 4
    assert "4 of 7 linear layers rewritten, 2 fused chains" in text
    assert "engine: reference" in lines and "1  recipe fp8-exact: default" in lines
    assert all(text.count(rule) == 1 for rule in (": default", "2  recipe fp8-exact: chain mlp"))
    low = lines[lines.index("low:") + 1 :]
    assert " ".join(" ".join(low).split()) == report["blocks.0.mlp.up"].scheme
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_is_as_wide_as_the_terminal(monkeypatch, width):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_name_of_some_length = nn.ModuleDict({"another_one_that_is_long": Mixed()})

        def forward(self, x):
            return self.a_name_of_some_length["another_one_that_is_long"](x)

    monkeypatch.setenv("COLUMNS", str(width))
    report = fp4.explain(Deep(), (X,), policy=policy(default="low"))
    lines = str(report).splitlines()
    assert max(len(line) for line in lines) <= width
    start = "a_name_of_some_length.another_one_that_is_long"
    assert any(line.startswith(f"{start}.mlp.up ") for line in lines) == (width == 200)
    assert sum(line.startswith("a_name_of_some_") for line in lines) == len(report) == 8
    assert sum("float64" in line for line in lines) == 1, "a reason is written once"


def test_an_engine_of_its_own_makes_a_column():
    report = fp4.explain(Net(1), (X,), policy=LOW)
    report.rows[-1] = replace(report.rows[-1], engine="cuda")
    lines = str(report).splitlines()
    assert "engine" in lines[0].split() and "engine: reference" not in lines
    assert "cuda" in lines[5].split() and "reference" in lines[4].split()


def test_json_of_the_report():
    rows = json.loads(json.dumps(fp4.explain(Net(1), (X,)).as_dicts()))
    assert rows[0]["fqn"] == "blocks.0.attn" and isinstance(rows[1]["saved_bytes"], int)


def test_a_gemm_without_its_engine_says_why(monkeypatch):
    from fp4compile.kernels import engines

    assert all(not row.reason for row in fp4.explain(Net(1), (X,)).rewritten)
    monkeypatch.setattr(engines, "why_reference", lambda left, right, device: "no such GPU")
    found = fp4.explain(Net(1), (X,), policy=policy(default="low", recipe="fp8-block"))
    assert found.rewritten and all(row.reason == "no such GPU" for row in found.rewritten)
    assert "no such GPU" in str(found)


# Bytes ---------------------------------------------------------------------------------------------

POLICIES = {
    "fp8-exact": policy(default="low"),
    "thinking-machines": policy(default="low", recipe="thinking-machines"),
    "nvidia": policy(default="low", recipe="nvidia"),
    "mxfp8": policy(default="mxfp8", recipe="mxfp8"),
    "fp8-block": policy(default="low", recipe="fp8-block"),
    "original": policy(recipe="bf16"),
}


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [*((name, torch.float32) for name in POLICIES), ("fp8-exact", torch.bfloat16)],
)
@pytest.mark.parametrize("make", [lambda: nn.Linear(D, 48), Mlp], ids=["linear", "chain"])
def test_saved_bytes_are_those_of_the_backward_graphs_inputs(recipe, dtype, make):
    model = make().to(dtype)
    x = X.to(dtype).requires_grad_()
    found = aot(model, x, POLICIES[recipe])
    kept = saved_for_backward(found.forward[0], found.backward[0])
    # parameters are there anyway; nvidia's chain keeps one factor of four bytes in another shape
    held = {tuple(map(str, p.shape)) for p in model.parameters()}
    extra = sum(s.nbytes for s in kept if not (s.name.startswith("primals") and s.shape in held))
    report = fp4.explain(model, (x,), policy=POLICIES[recipe])
    saved = sum(row.saved_bytes for row in report)
    if recipe == "original" and make is Mlp:  # the activation keeps its input, too
        assert saved == extra - 32 * 64 * dtype.itemsize
    else:
        assert 0 <= extra - saved <= 4 * (recipe == "nvidia")
    assert fp4.explain(model).rows == report.rows
    assert report.saved_bytes == (0 if recipe == "original" else saved)


class Chain(nn.Module):
    """64 -> 256 -> 64, gated or not."""

    def __init__(self, act, gated):
        super().__init__()
        self.act, self.up, self.down = act, nn.Linear(64, 256), nn.Linear(256, 64)
        self.gate = nn.Linear(64, 256) if gated else None

    def forward(self, x):
        if self.gate is not None:
            return self.down(self.act(self.gate(x)) * self.up(x))
        return self.down(self.act(self.up(x)))


def measured(model, backend, x):
    """Bytes that autograd is given to keep beside the parameters, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.compile(model, backend=backend)(x)
    return sum(t.nbytes for at, t in kept.items() if at not in parameters)


ACTS = {
    "gelu": F.gelu, "relu": F.relu, "relu2": lambda z: F.relu(z).square(), "silu": F.silu,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("act", "gated"), [*((a, False) for a in ACTS), ("silu", True), ("relu", True)])
def test_original_bytes_are_what_plain_compile_keeps(act, gated, dtype):
    model, x = Chain(ACTS[act], gated).to(dtype), batch(256, 64).to(dtype)
    report = fp4.explain(model, x)
    assert len(report.rewritten) == 2 + gated
    # Inductor's partitioner without Inductor's kernels
    assert report.original_bytes == measured(model, "aot_eager_decomp_partition", x)
    kib = {(False, 4): 576, (False, 2): 288, (True, 4): 832, (True, 2): 416}[gated, dtype.itemsize]
    if (act, gated) == ("relu", False):  # its derivative needs its result alone
        kib -= 64 * dtype.itemsize
    assert report.original_bytes == kib * 1024


def test_frozen_layers_keep_nothing():
    """Bytes kept are those of the tensors that autograd holds, parameters apart."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    x = batch(256, 64)
    bytes_kept = []
    for trained in ({0, 1, 2}, {2}, {0}, set()):
        model = nn.Sequential(*(Residual() for _ in range(3)))
        for i, block in enumerate(model):
            block.requires_grad_(i in trained)
        report = fp4.explain(model, x, policy=policy(default="low"))
        bytes_kept.append(report.saved_bytes)
        first = {row.fqn: row.saved_bytes for row in report}
        frozen_before = [i for i in range(3) if i not in trained and not any(j < i for j in trained)]
        assert all(first[f"{i}.{n}"] == 0 for i in frozen_before for n in ("up", "down"))
    assert bytes_kept[0] > bytes_kept[2] > bytes_kept[1] > bytes_kept[3] == 0


def test_an_input_that_two_layers_share_counts_once():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

        def forward(self, x):
            return self.q(x) + self.k(x) * self.v(x)

    rows = fp4.explain(Three(), (X,), policy=LOW).rows
    alone = fp4.explain(nn.Linear(D, D), (X,), policy=LOW).saved_bytes
    weight = rows[1].saved_bytes
    assert rows[1].saved_bytes == rows[2].saved_bytes and rows[0].saved_bytes == alone > weight
    found = aot(Three(), X.clone().requires_grad_(), LOW)
    kept = saved_for_backward(found.forward[0], found.backward[0])
    codes = [s for s in kept if s.name.startswith("fp4::quantize")]
    assert sum(s.shape == ("32", "16") for s in codes) == 4, "one input, three weights"


@pytest.mark.parametrize("first", ["q", "k"])
def test_an_input_that_a_left_layer_keeps_counts_there(first):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            one, other = (self.q, self.k) if first == "q" else (self.k, self.q)
            return one(x) * other(x)

    report = fp4.explain(Two(), X, policy=policy(default="low", layers=[{"match": "k", "scheme": "original"}]))
    assert report["k"].saved_bytes == report["k"].original_bytes == X.nbytes
    assert report["q"].original_bytes == 0 < report["q"].saved_bytes
    assert (report.saved_bytes, report.original_bytes) == (report["q"].saved_bytes, 0)


def test_the_summary_is_about_the_rewritten_layers():
    report = fp4.explain(Net(1), (X,))
    chain = [report["blocks.0.mlp.up"], report["blocks.0.mlp.down"]]
    assert report.rewritten == chain
    assert report.saved_bytes == sum(row.saved_bytes for row in chain)
    assert report.original_bytes == sum(row.original_bytes for row in chain) == 32 * (32 + 64 + 64) * 4
    assert report.summary().startswith("2 of 4 linear layers rewritten, 1 fused chain; these layers keep ")
    assert report.summary().endswith(" for backward, 20.0 KiB in high precision")
    assert fp4.explain(Net(1), (X,), policy=policy(recipe="bf16")).summary() == (
        "0 of 4 linear layers rewritten, 0 fused chains"
    )


def test_nothing_is_kept_without_gradients():
    with torch.no_grad():
        rows = fp4.explain(Net(1), (X,)).rows
    assert {(row.saved_bytes, row.original_bytes) for row in rows} == {(0, 0)}


def test_reasons_of_layers_that_a_rule_asks_to_quantize_come_first():
    given = policy(recipe="bf16", layers=[{"match": "blocks.0.mlp.*", "scheme": "mxfp8"}])
    report = fp4.explain(Net(2).double(), (X.double(),), policy=given)
    assert "7 linear layers were left (2 of them: the input is float64" in report.nothing()
    assert "default" in fp4.explain(Net(1), (X,), policy=policy(recipe="bf16")).nothing()


# As it was -----------------------------------------------------------------------------------------


class Stateful(Net):
    def __init__(self, n=2):
        super().__init__(n)
        self.register_buffer("steps", torch.zeros(()))
        self.drop, self.bn = nn.Dropout(0.5), nn.BatchNorm1d(8)

    def forward(self, x):
        self.steps += 1
        return super().forward(self.drop(self.bn(x)))


def state_of(model):
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        name: (
            {k: v for k, v in m.__dict__.items() if k.startswith("fp4")},
            set(m.__dict__),
            m.training,
            [list(getattr(m, table).items()) for table in hooks],
            [(k, id(p), p._version, p.grad is None) for k, p in m._parameters.items() if p is not None],
            {k: b.clone() for k, b in m._buffers.items() if b is not None},
        )
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize(
    ("kind", "stamped"),
    [(Stateful, False), (Broken, False), (Broken, True), (Mixed, True), (Checkpointed, False)],
)
def test_the_model_is_left_as_it_was(kind, stamped):
    model = kind()
    model.train()
    if stamped:
        fp4.apply(model, LOW)
    model.register_forward_pre_hook(lambda m, a: None)
    before, rng = state_of(model), torch.get_rng_state()
    grad = torch.is_grad_enabled()
    config = torch._dynamo.config.recompile_limit
    fp4.explain(model, (X,), policy=None if stamped else GIVEN if kind is Mixed else LOW)
    assert state_of(model).keys() == before.keys()
    for name, now in state_of(model).items():
        *rest, buffers = now
        *rest_before, buffers_before = before[name]
        assert rest == rest_before, name
        assert all(torch.equal(buffers[k], buffers_before[k]) for k in buffers_before), name
    assert torch.equal(torch.get_rng_state(), rng) and torch.is_grad_enabled() == grad
    assert torch._dynamo.config.recompile_limit == config


def test_the_model_is_left_as_it_was_after_an_error():
    class Bad(Stateful):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError("in the model")

    model = Bad()
    before = state_of(model)
    with pytest.raises(RuntimeError, match="in the model"):
        fp4.explain(model, (X,))
    assert {k: v[:4] for k, v in state_of(model).items()} == {k: v[:4] for k, v in before.items()}
    assert model.steps == 0


def test_explaining_is_no_eager_run_of_a_watched_model():
    model = Mixed()
    fp4.apply(model, {**GIVEN, "strict": False})
    with precision_warnings() as texts:
        report = fp4.explain(model, (X,))
    assert not texts and report["eager.up"].status == "not compiled"


def test_a_strict_model_can_be_explained():
    model = Mixed()
    fp4.apply(model, policy(default="low", strict=True))
    assert fp4.explain(model, (X,))["eager.up"].status == "not compiled"


def test_a_bad_policy_is_the_policys_error():
    with pytest.raises(fp4.PolicyError, match="did you mean 'mxfp8'"):
        fp4.explain(Net(1), (X,), policy=policy(recipe="mxfp"))
    with pytest.raises(fp4.PolicyError, match="stamped with another policy"):
        model = Net(1)
        fp4.apply(model, LOW)
        fp4.explain(model, (X,), policy=policy(default="mxfp8"))


def test_another_policy_needs_inputs_and_a_model_without_inputs_does_not():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.x = nn.Linear(D, D), nn.Parameter(torch.randn(4, D))

        def forward(self, x=None):
            return self.a(self.x)

    model = Net(1)
    compiled(model, LOW)(X)
    with pytest.raises(fp4.Fp4Error, match="give example inputs"):
        fp4.explain(model, policy=policy(recipe="bf16"))
    model = Constant()
    assert fp4.explain(model, policy=LOW)["a"].status == "rewritten"
    compiled(model, policy(recipe="bf16"))()
    assert fp4.explain(model)["a"].status == "left", "what ran comes before what would run"


def test_keyword_arguments_and_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, D)

        def forward(self, x, *, scale):
            return self.a(x) * scale

    report = fp4.explain(Two(), (X,), {"scale": 2.0}, LOW)
    assert report["a"].status == "rewritten"
    assert fp4.explain(Two(), kwargs={"x": X, "scale": 1.0}, policy=LOW)["a"].status == "rewritten"


def test_a_tensor_alone_is_the_only_input():
    assert fp4.explain(Net(1), X).rows == fp4.explain(Net(1), (X,)).rows
    assert fp4.explain(Net(1), args=X[:1]).rows == fp4.explain(Net(1), (X[:1],)).rows


def test_what_is_no_module_is_refused_in_one_line():
    for wrong, words in (
        (Net, r"^explain: Net is a class: give a module, such as Net\(...\)$"),
        (F.gelu, "^explain: a torch module is needed, not "),
    ):
        with pytest.raises(fp4.Fp4Error, match=words):
            fp4.explain(wrong, (X,))


# After training ------------------------------------------------------------------------------------


def test_the_recorded_report_is_that_of_the_run():
    model = Net(2)
    with pytest.raises(fp4.Fp4Error, match="no graph of its own.*fp4.explain") as caught:
        fp4.explain(model)
    assert "\n" not in str(caught.value)
    call = compiled(model, LOW)
    call(X).sum().backward()
    report = fp4.explain(model)
    asked = fp4.explain(Net(2), (X,), policy=LOW)
    assert report.rows == asked.rows and report.saved_bytes > 0
    with torch.no_grad():
        call(X)
    assert fp4.explain(model).rows == report.rows, "evaluation keeps the training bytes"
    assert fp4.explain(call).rows == report.rows, "the compiled module, too"


def test_the_recorded_report_has_what_ran_eagerly():
    model = Mixed()
    call = compiled(model, GIVEN)
    call(X)
    call(X)
    found = {row.fqn: (row.status, row.reason) for row in fp4.explain(model)}
    assert found["eager.up"] == ("not compiled", "its frame ran without Dynamo")
    assert found["unused"] == ("not compiled", "no captured graph reached it")
    assert found["last"][0] == "rewritten" and len(found) == 8


@pytest.mark.parametrize("recorded", [False, True])
def test_blocks_that_share_a_graph_are_all_reported(recorded):
    model = Broken(6)
    given = policy(layers=[{"match": "blocks.4.mlp.*", "scheme": "mxfp8"}])
    if recorded:
        compiled(model, given)(X)
    report = fp4.explain(model) if recorded else fp4.explain(model, (X,), policy=given)
    for i in range(6):
        wanted = "mxfp8" if i in (4, 5) else "low"
        row = report[f"blocks.{i}.mlp.up"]
        assert (row.status, row.scheme_name) == ("rewritten", wanted), i
        assert ("match" in row.rule) == (i == 4)
    assert len(report) == 6 * 3 + 1


def test_the_recorded_report_follows_the_stamps():
    model = Net(1)
    given = policy(default="low", phases=[{"from_step": 5, "fprop": "original"}])
    call = compiled(model)
    seen = []
    for at in (0, 5, 0):
        fp4.apply(model, given, step=at)
        call(X).sum().backward()
        report = fp4.explain(model)
        seen.append(report["head"].scheme.startswith("fprop(original)"))
        assert len(report) == 4 and report.policy == "<dict>"
    assert seen == [False, True, False]


def test_a_model_compiled_in_parts_has_one_report():
    model = Net(2)
    fp4.apply(model, LOW)
    for block in model.blocks:
        block.compile(backend="fp4", options={"compiler": "eager"})
    with pytest.raises(fp4.Fp4Error, match="give example inputs"):
        fp4.explain(model)
    model(X)
    report = fp4.explain(model)
    assert [row.status for row in report] == ["rewritten"] * 6 + ["not compiled"]
    assert [row.chain for row in report] == [None, 0, 0, None, 1, 1, None]
    assert [row.fqn for row in report][3:] == ["blocks.1.attn", "blocks.1.mlp.up", "blocks.1.mlp.down", "head"]
    report = fp4.explain(model, (X,))
    assert {row.status for row in report} == {"rewritten"}


def test_two_models_of_one_call_have_reports_of_their_own():
    student, teacher = Net(2), Mlp()

    @torch.compile(backend="fp4", options={"compiler": "eager", "policy": LOW})
    def train(student, teacher, x):
        return (student(x).mean() - teacher(x).detach().mean()).square()

    train(student, teacher, X).backward()
    assert len(fp4.explain(student)) == 7 and len(fp4.explain(teacher)) == 2


def test_a_layer_compiled_again_keeps_one_row():
    model = Net(1)
    call = compiled(model, LOW, dynamic=False)
    for n in (2, 3, 4):
        call(batch(n, 8, D))
    report = fp4.explain(model)
    assert len(report) == 4 and {row.chain for row in report} == {0, None}
    assert report["head"].original_bytes == 4 * 8 * D * 4


def test_a_shared_module_has_a_row_for_each_use():
    model = Twice()
    call = compiled(model, LOW, dynamic=False)
    for n in (2, 3):
        call(batch(n, 8, D))
        rows = fp4.explain(model).rows
        assert [r.fqn for r in rows] == ["mlp.up", "mlp.up", "mlp.down", "mlp.down"]
        assert {r.original_bytes for r in rows if r.fqn == "mlp.up"} == {n * 8 * (D + 2 * D) * 4}


def test_reports_do_not_keep_models_alive():
    import gc
    import weakref

    for make in (lambda: nn.Linear(D, D), lambda: Broken(2)):
        model = make()
        compiled(model, LOW)(X)
        fp4.explain(model)
        seen = weakref.ref(model)
        del model
        torch._dynamo.reset()
        gc.collect()
        assert seen() is None


def test_the_command_line(monkeypatch, tmp_path):
    from types import ModuleType

    from typer.testing import CliRunner

    from fp4compile.cli import app

    mine = ModuleType("mine")
    mine.make, mine.wrong = lambda: (Mlp(), (X,)), lambda: 3
    monkeypatch.setitem(sys.modules, "mine", mine)
    run = CliRunner().invoke
    rows = json.loads(run(app, ["explain", "mine:make", "--json"]).stdout)
    assert [row["status"] for row in rows] == ["rewritten"] * 2
    given = tmp_path / "p.yaml"
    given.write_text("version: 1\nrecipe: bf16\n")
    table = run(app, ["explain", "mine:make", "--policy", str(given)]).stdout
    assert "0 of 2 linear layers rewritten" in table
    assert run(app, ["explain", "mine:make", "--policy", "bf16"]).stdout == table
    failed = run(app, ["explain", "mine:wrong"])
    assert failed.exit_code == 2 and "returned int" in failed.output
