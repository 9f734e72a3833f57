"""Every primitive: one set of bits from every implementation and any number of threads, fake
results like the real ones, schemas that tell the truth."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from fp4compile.kernels import engines, fallback, native, primitives
from fp4compile.kernels.activations import ACTIVATIONS, evaluate
from layer_oracle import EXACT, LOW, data, mixes, off
from primitive_cases import GRADIENTS, Case, Tensors, every_case, gradient_cases, results, same_bits

fp4 = torch.ops.fp4
F32 = torch.float32
SIZES = [
    (37, 48),
    (64, 33),
    (1, 17),
    (70, 130),
    (0, 48),
    (5, 0),
]  # the larger ones with NaN and Inf
needs_native = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])


def describe(case: Case) -> str:
    words = [
        a if isinstance(a, (str, bool)) else list(a.shape)
        for a in case[1]
        if hasattr(a, "shape") or isinstance(a, (str, bool))
    ]
    return f"{case[0]} {words}"


def test_every_primitive_has_a_case() -> None:
    """Those that write over their input do what the ones without the underscore do."""
    names = {name.removesuffix("_") for name in primitives.NAMES}
    assert {name for name, _ in every_case(Tensors(3, 4))} == names


@pytest.mark.parametrize("name", ["act_grad", "glu_grad"])
def test_results_written_over_the_input(name: str) -> None:
    for case, (g, *rest) in every_case(Tensors(21, 40)):
        if case == name:
            dz, *others = getattr(fp4, name)(g, *rest)
            over = g.clone()
            again = getattr(fp4, f"{name}_")(over, *rest)
            assert all(same_bits(a, b) for a, b in zip((dz, *others), (over, *again)))


@needs_native
@pytest.mark.parametrize("m,n", SIZES)
def test_native_kernels_give_the_reference_bits(m: int, n: int, monkeypatch) -> None:
    """All results, stochastic ones and column sums included."""
    cases = every_case(Tensors(m, n, seed=10 * m + n, rough=m > 60))
    fast = [results(case) for case in cases]
    assert fallback.native_for(torch.device("cpu")) is not None
    monkeypatch.setattr(fallback, "native_for", lambda device: None)
    for case, got in zip(cases, fast):
        want = results(case)
        assert len(got) == len(want)
        for i, (a, b) in enumerate(zip(got, want)):
            assert same_bits(a, b), f"result {i} of {describe(case)}"


@pytest.mark.parametrize("native_kernels", [True, False])
def test_threads_change_no_bit(native_kernels: bool, monkeypatch) -> None:
    """Large enough for PyTorch and the native kernels to split: activations, sums, everything."""
    if not native_kernels:
        monkeypatch.setattr(fallback, "native_for", lambda device: None)
    cases = [case for case in every_case(Tensors(400, 100)) if case[0] != "scaled_mm"]
    cases = cases[::9] if native_kernels else cases[::40]
    torch.set_num_threads(1)
    one = [results(case) for case in cases]
    torch.set_num_threads(2)
    for case, want in zip(cases, one):
        for got, expected in zip(results(case), want):
            assert same_bits(got, expected), describe(case)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_threads_and_activations(act: str) -> None:
    """PyTorch's own loops leave the end of each thread's share to another exp and tanh."""
    row = ACTIVATIONS[act]
    for n in (1, 16384, 16389, 40001, 65536, 70001, 120005, 1 << 18):
        z, g = data(n, seed=n) * 3, data(n, seed=n + 1)
        runs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append((evaluate(row.forward, z), evaluate(row.backward, g, z)))
        for run in runs[1:]:
            assert all(same_bits(a, b) for a, b in zip(run, runs[0])), n
        assert off(runs[0][0], row.forward(z)) < 1e-6
        assert off(runs[0][1], row.backward(g, z)) < 1e-6


def test_threads_and_whole_steps() -> None:
    """Bias gradients bit for bit; the rest to the rounding of the BLAS library's sums, which may
    split them by threads. No code and no random bit moves, or the distance would be 1e-4."""
    x, w, b = (
        data(*s, seed=i).requires_grad_() for i, s in enumerate(((700, 96), (48, 96), (48,)))
    )
    g = data(700, 48, seed=5)
    for text in (EXACT, LOW["thinking-machines"], LOW["nvidia"], *mixes(EXACT)[1:]):
        runs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            y = fp4.linear(x, w, b, text, F32)
            runs.append((y, *torch.autograd.grad(y, (x, w, b), g)))
        assert all(off(a, c) < 1e-6 for a, c in zip(*runs))
        assert torch.equal(runs[0][3], runs[1][3])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            alone = torch.autograd.grad(fp4.linear(x.detach(), w.detach(), b, text, F32), b, g)[0]
            assert torch.equal(alone, runs[0][3]), "the bias gradient depends on who else has one"


def test_column_sums_are_sums() -> None:
    for m, n in ((0, 3), (1, 1), (31, 5), (32, 5), (33, 5), (1000, 7)):
        g = data(m, n)
        assert torch.allclose(fallback.column_sums(g).double(), g.double().sum(0), atol=1e-4)


TOOLS = ("test_schema", "test_faketensor", "test_autograd_registration")


def opcheck_cases() -> list[Case]:
    cases = every_case(Tensors(21, 40))
    over = [(f"{n}_", (a[0].clone(), *a[1:])) for n, a in cases if n in ("act_grad", "glu_grad")]
    return [("quantize", (data(3, 0), "nvfp4:row", "f32", True)), *cases, *over]


@pytest.mark.parametrize("name", primitives.NAMES)
@pytest.mark.parametrize("native_kernels", [True, False])
def test_opcheck(name: str, native_kernels: bool, monkeypatch) -> None:
    if not native_kernels:
        monkeypatch.setattr(fallback, "native_for", lambda device: None)
    cases = [case for case in opcheck_cases() if case[0] == name]
    for _, arguments in cases[:: 1 + len(cases) // 12]:
        torch.library.opcheck(getattr(fp4, name).default, arguments, test_utils=TOOLS)


@pytest.mark.parametrize("name", primitives.NAMES)
def test_opcheck_of_traced_graphs(name: str) -> None:
    """Through AOTAutograd with symbolic sizes; primitives see no tensor that requires a gradient."""
    case = next(case for case in opcheck_cases() if case[0] == name)
    torch.library.opcheck(
        getattr(fp4, name).default, case[1], test_utils=("test_aot_dispatch_dynamic",)
    )


@pytest.mark.parametrize("text", [*LOW.values(), mixes(EXACT)[1], "original"])
def test_opcheck_of_layers(text: str) -> None:
    """Their seed is drawn in backward, so the comparison of two backward runs is left out."""
    x, w, b = (data(*s, seed=i).requires_grad_() for i, s in enumerate(((5, 17), (17, 17), (17,))))
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    for out in (F32, torch.bfloat16):
        ends = (text, text, out, out)
        torch.library.opcheck(fp4.linear.default, (x, w, b, text, out), **checks)
        torch.library.opcheck(
            fp4.linear_act_linear.default, (x, w, b, w, None, "gelu", *ends), **checks
        )
        torch.library.opcheck(
            fp4.gated_linear.default, (x, w, b, w, None, w, b, "silu", text, *ends), **checks
        )


def test_engines_give_contiguous_results() -> None:
    """Fake results are contiguous; an engine that pads must not return a view of the padding."""
    a, b = (
        data(*s, seed=i).clamp(-4, 4).to(torch.float8_e4m3fn)
        for i, s in enumerate(((16, 48), (33, 48)))
    )
    want = a.float() @ b.float().t()
    for engine, x, y in (
        ("reference", a.float(), b.float()),
        ("fp8", a.view(torch.uint8), b.view(torch.uint8)),
    ):
        for out in (F32, torch.bfloat16):
            try:
                got = engines.matmul(x, y, engine, out)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                assert engine == "fp8", error  # no FP8 GEMM on this CPU
                continue
            assert got.is_contiguous() and got.dtype == out and off(got, want) < 5e-3


CHILD = """
import hashlib, torch
from fp4compile.kernels import native, ops
torch.set_num_threads(1)
digest = hashlib.sha256()
def put(*tensors):
    for t in tensors: digest.update(t.detach().numpy().tobytes())
g = torch.Generator().manual_seed(0)
x, w, w2 = (torch.randn(*s, generator=g).requires_grad_() for s in ((21, 48), (40, 48), (16, 40)))
for text in TEXTS:
    torch.manual_seed(0)
    y = torch.ops.fp4.linear(x, w, None, text, torch.float32)
    z = torch.ops.fp4.linear_act_linear(x, w, None, w2, None, "relu", text, text, torch.float32, torch.float32)
    put(y, z, *torch.autograd.grad(y.sum() + z.sum(), (x, w, w2)))
reply = f"{native.available()} {digest.hexdigest()}"
"""


def test_without_a_compiler(tmp_path) -> None:
    """The reason is one line, and every result is the same, bit for bit."""
    code, here = CHILD.replace("TEXTS", repr(list(LOW.values()))), {}
    exec(code, here)
    environment = {**os.environ, "CXX": "/nowhere/c++", "FP4COMPILE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code + "print(reply)"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    reply = done.stdout.strip()
    assert reply.startswith("(False, 'no C++ compiler") and "\n" not in reply
    assert reply.endswith(here["digest"].hexdigest())
    assert here["reply"].startswith("(True, '')") or not native.available()[0]


def test_gradient_formats_are_covered() -> None:
    """Both orientations stochastic, one left out, both left out, rotated, nearest."""
    pairs = {(bool(d), bool(w)) for d, w in GRADIENTS}
    assert len(pairs) == 4 and len(list(gradient_cases(Tensors(3, 4)))) == 8 * len(GRADIENTS)
