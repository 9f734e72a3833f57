"""The entry point, its options, its errors, and what happens without a policy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from backend_models import (
    Block,
    Mlp,
    Net,
    batch,
    compiled,
    policy,
    precision_warnings,
    schemes,
    step,
)
from torch import nn

import fp4compile as fp4
from fp4compile.backend import inductor_options, patches

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()


def run_python(code, **env):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def test_entry_point_needs_no_import():
    code = """
import sys, torch
from torch import nn
m = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
assert "fp4compile" not in sys.modules
c = torch.compile(m, backend="fp4", options={"compiler": "eager"})
y = c(torch.randn(4, 32)); y.sum().backward()
import fp4compile as fp4
print([r.status for r in fp4.explain(m)], "fp4" in torch._dynamo.list_backends())
"""
    done = run_python(code)
    assert done.stdout.split("\n")[0] == "['rewritten', 'rewritten'] True", done.stderr


def raises(options, error, *words, **kwargs):
    """The error comes out of the compiled call as itself, in one line."""
    call = torch.compile(Net(1), backend="fp4", options=options, **kwargs)
    with pytest.raises(error) as caught:
        call(X)
    text = str(caught.value)
    assert type(caught.value).__name__ == error.__name__
    assert "\n" not in text and all(word in text for word in words), text
    assert text in repr(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compiler": "indutor"}, ("unknown compiler 'indutor'", "did you mean 'inductor'")),
        ({"compiler": 3}, ("unknown compiler 3",)),
        ({"polcy": "p.yaml"}, ("'polcy'", "did you mean 'policy'")),
        ({"max_autotun": True}, ("'max_autotun'", "did you mean 'max_autotune'")),
        ({"triton.cudagraph": True}, ("did you mean 'triton.cudagraphs'",)),
        ({"policy": 3}, ("not 3 (int)",)),
        ({"policy": ["a"]}, ("(list)",)),
        ({"policy": "nowhere.yaml"}, ("nowhere.yaml", "no such file")),
        ({"policy": {"version": 1, "recipe": "mxfp"}}, ("'mxfp'", "did you mean 'mxfp8'")),
        ({"policy": {}}, ("version",)),
    ],
)
def test_bad_options_are_policy_errors(options, words):
    raises(options, fp4.PolicyError, *words)


def test_an_unknown_option_is_refused_whatever_compiles():
    raises({"compiler": "eager", "max_autotun": True}, fp4.PolicyError, "max_autotun")


def test_an_unknown_mode_is_refused():
    call = torch.compile(Net(1), backend="fp4", mode="reduce-overheads")
    with pytest.raises(fp4.PolicyError, match="did you mean 'reduce-overhead'"):
        call(X)


def test_strict_refusal_comes_out_as_itself():
    net = Net(1).double()
    call = compiled(net, policy(strict=True, default="low"))
    with pytest.raises(fp4.PrecisionError) as caught:
        call(X.double())
    text = str(caught.value)
    assert "\n" not in text and "'blocks.0.attn'" in text and "float64" in text


def test_a_refused_policy_can_be_corrected():
    net = Net(1)
    with pytest.raises(fp4.PolicyError):
        compiled(net, policy(default="lo"))(X)
    compiled(net, policy(default="low"))(X)
    assert schemes(net)["head"] == "low"


def test_options_reach_inductor_under_its_own_names():
    given = {"max-autotune": False, "triton.cudagraphs": True}
    assert inductor_options(given, None) == {"max_autotune": False, "triton.cudagraphs": True}
    assert inductor_options({}, "reduce-overhead") == {"triton.cudagraphs": True}
    assert inductor_options({}, "default") == {}
    merged = inductor_options({"coordinate_descent_tuning": False}, "max-autotune")
    assert merged["max_autotune"] is True and merged["coordinate_descent_tuning"] is False


def config_patches(monkeypatch, **kwargs):
    """What reaches `compile_fx`."""
    import torch._inductor.compile_fx as inductor

    found = {}

    def compile_fx(gm, inputs, config_patches=None, **rest):
        found.update(config_patches)
        return gm.forward

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    torch.compile(Net(1), backend="fp4", **kwargs)(X)
    return found


def test_options_and_modes_reach_compile_fx(monkeypatch):
    found = config_patches(monkeypatch, options={"max_autotune": False, "epilogue_fusion": True})
    assert found["max_autotune"] is False and found["epilogue_fusion"] is True
    assert "policy" not in found and "compiler" not in found
    torch._dynamo.reset()
    assert config_patches(monkeypatch, mode="max-autotune")["triton.cudagraphs"] is True
    torch._dynamo.reset()
    assert "triton.cudagraphs" not in config_patches(monkeypatch, mode="default")


def test_the_users_own_graph_passes_are_kept():
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __init__(self, name, calls):
            self.name, self.calls = name, calls

        def __call__(self, graph):
            self.calls.append(self.name)

        def uuid(self):
            return self.name

    calls = []
    key = "joint_custom_pre_pass"
    mine = patches({key: Pass("option", calls)}, "p")[key]
    mine(torch.fx.Graph())
    with config.patch({key: Pass("config", calls)}):
        theirs = patches({}, "p")[key]
    theirs(torch.fx.Graph())
    assert calls == ["option", "config"]
    assert len({str(p.uuid()) for p in (mine, theirs)}) == 2 and mine.uuid() and theirs.uuid()
    with config.patch({key: lambda graph: calls.append("plain")}):
        plain = patches({}, "p")[key]
    assert plain.uuid() is None, "a pass without a uuid must bypass the cache"


def test_cache_key_depends_on_policy_and_sources(monkeypatch):
    from fp4compile import cache_key

    key = "post_grad_custom_pre_pass"
    one, other = (str(patches({}, text)[key].uuid()) for text in ("a", "b"))
    assert one != other and one == str(patches({}, "a")[key].uuid())
    monkeypatch.setattr(cache_key, "source_hash", lambda: b"changed")
    assert str(patches({}, "a")[key].uuid()) != one


def test_source_hash_covers_every_shipped_source():
    import fp4compile.kernels
    import fp4compile.passes

    from fp4compile.cache_key import SUFFIXES

    shipped = set()
    for package in (fp4compile, fp4compile.kernels, fp4compile.passes):
        from pathlib import Path

        root = Path(next(iter(package.__path__)))
        files = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        shipped |= {p.suffix for p in files} - {"", ".typed", ".json", ".bak", ".orig"}
    assert shipped <= SUFFIXES


@pytest.mark.parametrize("kind", ["path", "Path", "Policy", "dict"])
def test_a_policy_in_every_form(kind, tmp_path):
    text = "version: 1\ndefault: mxfp8\n"
    path = tmp_path / "p.yaml"
    path.write_text(text)
    given = {
        "path": str(path), "Path": path, "Policy": fp4.Policy.load(path),
        "dict": policy(default="mxfp8"),
    }[kind]  # fmt: skip
    net = Net(1)
    compiled(net, given)(X)
    assert schemes(net)["head"] == "mxfp8"


def test_an_edited_policy_file_is_read_again(tmp_path):
    path = tmp_path / "p.yaml"
    for scheme in ("mxfp8", "original"):
        path.write_text(f"version: 1\ndefault: {scheme}\n")
        torch._dynamo.reset()
        net = Net(1)
        compiled(net, str(path))(X)
        assert schemes(net)["head"] == ("mxfp8" if scheme == "mxfp8" else "left")


def test_default_policy_on_mlp_chains_only():
    net = Net(12)
    with precision_warnings() as texts:
        compiled(net)(X)
    found = schemes(net)
    for i in range(12):
        wanted = "mxfp8" if i >= 10 else "low"  # 16.6 % of 12 blocks: 2
        assert found[f"blocks.{i}.mlp.up"] == found[f"blocks.{i}.mlp.down"] == wanted
        assert found[f"blocks.{i}.attn"] == "left"
    assert found["head"] == "left" and len(found) == 12 * 3 + 1 and not texts
    report = fp4.explain(net)
    schemes_of_recipe = fp4.Policy.recipe("fp8-exact").schemes
    assert report["blocks.0.mlp.up"].scheme == str(schemes_of_recipe["low"])
    assert report["blocks.11.mlp.up"].scheme == str(schemes_of_recipe["mxfp8"])


class Plain(nn.Module):
    """No MLP anywhere."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D := 32, D), nn.Linear(D, D)

    def forward(self, x):
        return self.b(torch.softmax(self.a(x), -1))


def test_one_line_where_nothing_was_rewritten():
    net = Plain()
    call = compiled(net)
    with precision_warnings() as texts:
        for n in (2, 3, 4):
            call(batch(n, 32))
        with torch.no_grad():
            call(batch(5, 32))
    assert len(texts) == 1 and "nothing was rewritten" in texts[0] and "2 linear" in texts[0]


def test_one_line_where_there_is_no_linear():
    with precision_warnings() as texts:
        compiled(nn.Sequential(nn.LayerNorm(32), nn.GELU()))(X)
    assert len(texts) == 1 and "no graph holds a linear layer" in texts[0]


def test_no_line_before_the_last_graph_of_the_model():
    class Late(Net):
        def forward(self, x):
            x = self.blocks[0].attn(x)
            torch._dynamo.graph_break()
            return self.blocks[0].mlp(x)

    net = Late(2)
    with precision_warnings() as texts:
        compiled(net)(X)
    assert not texts and schemes(net)["blocks.0.mlp.up"] == "low"


def test_a_rule_that_holds_for_nothing_is_said_once_or_is_an_error():
    given = policy(layers=[{"match": "blocks.*.mpl.up", "scheme": "low"}])
    call = compiled(Net(2), given)
    with precision_warnings() as texts:
        call(X)
        call(batch(2, 8, 32))
    (text,) = [t for t in texts if "holds for no layer" in t]
    assert "did you mean 'blocks." in text
    torch._dynamo.reset()
    with pytest.raises(fp4.PolicyError, match="holds for no layer"):
        compiled(Net(2), {**given, "strict": True})(X)


def test_missing_cxx_compiler_is_one_line():
    from torch._inductor import config

    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Softmax(-1))
    missing = {"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}
    with config.patch(missing), pytest.raises(fp4.Fp4Error, match=r"install g\+\+") as caught:
        torch.compile(model, backend="fp4")(X)
    assert "\n" not in str(caught.value)


def test_eager_and_aot_eager_take_the_same_step():
    net = Net(2)
    one = step(net, compiled(net, policy(default="low")), X)
    torch._dynamo.reset()
    other = step(net, compiled(net, policy(default="low"), compiler="aot_eager"), X)
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(one[1][n], other[1][n]) for n in one[1])


def test_suppressed_errors_are_still_a_line(caplog):
    """`suppress_errors` runs a refused frame eagerly; Dynamo logs why."""
    call = compiled(Net(1), policy(default="lo"))
    with torch._dynamo.config.patch(suppress_errors=True), caplog.at_level("WARNING"):
        call(X)
    assert "unknown scheme 'lo'" in caplog.text


def test_a_bare_linear_and_a_bare_function():
    linear = nn.Linear(32, 32)
    compiled(linear, policy(default="low"))(X)
    (row,) = fp4.explain(linear)
    assert row.fqn == "" and row.status == "rewritten" and "(the model)" in str(fp4.explain(linear))
    w = nn.Parameter(torch.randn(32, 32))
    call = compiled(lambda x, w: x @ w.t(), policy(default="low"))
    call(X, w).sum().backward()
    assert w.grad is not None


def test_mlp_and_block_of_one(graphs):
    for model in (Mlp(), Block()):
        compiled(model)(X)
    assert graphs.count == 2


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_users_dtype_mismatch_stays_torchs_error(compiler):
    """BF16 inputs of an FP32 model without autocast; rewritten, they would give BF16 silently."""
    x = batch().bfloat16()
    net = Mlp()
    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(net, compiler=compiler)(x)
    assert "outside of autocast (input bfloat16, weight float32" in fp4.explain(net)["up"].reason
    with pytest.raises(fp4.PrecisionError, match="'up'.*outside of autocast"):
        compiled(Mlp(), policy(strict=True), compiler=compiler)(x)
    net = Mlp()
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(net, policy(strict=True), compiler=compiler)(x).dtype == torch.bfloat16
    assert schemes(net) == {"up": "low", "down": "low"}
