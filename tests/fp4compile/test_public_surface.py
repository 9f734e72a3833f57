"""The public names, signatures, commands and option keys; a change here is a change for users."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import fp4compile as fp4

SIGNATURES = {
    "Policy.default": "() -> 'Policy'",
    "Policy.from_dict": "(data: 'Mapping') -> 'Policy'",
    "Policy.load": "(path: 'str | Path') -> 'Policy'",
    "Policy.parse": "(text: 'str', name: 'str' = '<string>') -> 'Policy'",
    "Policy.recipe": "(name: 'str') -> 'Policy'",
    "Policy.resolve": "(self, model: 'nn.Module', step: 'int | None' = None) -> 'Resolution'",
    "Policy.save": "(self, path: 'str | Path') -> 'None'",
    "ops_to_save": "() -> 'list[torch._ops.OpOverload]'",
    "Report.as_dicts": "(self) -> 'list[dict]'",
    "Report.summary": "(self) -> 'str'",
    "apply": (
        "(model: 'nn.Module', policy: 'Policy | str | Path | Mapping', step: 'int | None' = None)"
        " -> 'dict[str, str]'"
    ),
    "explain": (
        "(model: 'nn.Module', args: 'Sequence | Tensor' = (), kwargs: 'Mapping[str, Any] | None' = None,"
        " policy: 'Policy | str | Path | Mapping | None' = None, machine: 'str | None' = None) -> 'Report'"
    ),
    "Monitor.start": "(self) -> 'None'",
    "Monitor.step": "(self) -> 'None'",
    "Monitor.stop": "(self) -> 'None'",
}
MONITOR = ["model", "every", "rows", "csv", "tensorboard", "step", "automatic"]
READING = [
    "step", "layer", "operand", "format", "error", "zeros", "saturated", "nan_rows", "rows", "rms", "amax",
]  # fmt: skip
QUANTIZE = ["x", "format", "outer", "block", "block_scales", "scale_search", "rounding", "rotation", "seed", "stream"]
ROW = [
    "fqn", "kind", "shape", "scheme", "scheme_name", "rule", "engine", "saved_bytes",
    "original_bytes", "status", "reason", "chain", "refused", "predicted_ms", "original_ms",
]  # fmt: skip


def test_names():
    names = {
        "EngineError", "FormatError", "Fp4Error", "InputError", "Monitor", "Policy", "PolicyError",
        "PrecisionError", "PrecisionWarning", "QuantizedTensor", "Report", "apply", "bisect", "calibrate", "explain",
        "monitor", "ops_to_save", "quantize", "weights_changed",
    }  # fmt: skip
    assert set(fp4.__all__) == names <= set(dir(fp4))
    assert all(getattr(fp4, name).__doc__ for name in names)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = fp4.quantise


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    value = fp4
    for part in name.split("."):
        value = getattr(value, part)
    assert str(inspect.signature(value)) == SIGNATURES[name]


def test_quantize():
    parameters = inspect.signature(fp4.quantize).parameters
    assert list(parameters) == QUANTIZE
    q = fp4.quantize
    assert q.__module__.endswith("quantized")
    members = {"codes", "scales", "outer", "nbytes", "dequantize"}
    import torch

    made = q(torch.ones(2, 32), "nvfp4")
    assert all(hasattr(made, name) for name in members)


def test_rows_and_reports():
    from fp4compile.report import COLUMNS, Row

    assert [f.name for f in dataclasses.fields(Row)] == ROW
    assert COLUMNS == ("layer", "shape", "scheme", "chain", "engine", "kept", "ms", "status", "why")
    attributes = {"rows", "policy", "rewritten", "saved_bytes", "original_bytes", "graphs"}
    assert all(hasattr(fp4.Report(), name) for name in attributes)


def test_monitor():
    from fp4compile.monitoring import Reading

    assert list(inspect.signature(fp4.monitor).parameters) == MONITOR
    assert [f.name for f in dataclasses.fields(Reading)] == READING
    assert all(hasattr(fp4.Monitor, name) for name in ("readings", "as_dict", "__enter__", "__exit__"))


def test_errors():
    bases = {
        fp4.PolicyError: ValueError, fp4.FormatError: ValueError, fp4.InputError: TypeError,
        fp4.EngineError: RuntimeError, fp4.PrecisionError: RuntimeError,
    }  # fmt: skip
    for error, builtin in bases.items():
        assert issubclass(error, fp4.Fp4Error) and issubclass(error, builtin)
    assert issubclass(fp4.PrecisionWarning, UserWarning)


def test_backend_options():
    from fp4compile.backend import COMPILERS, OPTIONS
    from fp4compile.backend import fp4 as backend

    assert OPTIONS == ("policy", "compiler", "cache_weights")
    assert COMPILERS == ("inductor", "aot_eager", "eager")
    assert list(inspect.signature(backend).parameters) == ["gm", "example_inputs", "options", "mode"]


def test_entry_points():
    from importlib.metadata import entry_points

    (backend,) = [e for e in entry_points(group="torch_dynamo_backends") if e.name == "fp4"]
    assert backend.value == "fp4compile.backend:fp4"
    (command,) = [e for e in entry_points(group="console_scripts") if e.name == "fp4compile"]
    assert command.value == "fp4compile.cli:app"


def commands(app, prefix=""):
    found = {}
    for command in app.registered_commands:
        name = command.name or command.callback.__name__.replace("_", "-")
        found[prefix + name] = list(inspect.signature(command.callback).parameters)
    for group in app.registered_groups:
        found.update(commands(group.typer_instance, f"{prefix}{group.name} "))
    return found


def test_commands():
    from fp4compile.cli import app

    wanted = {
        "doctor": ["as_json"],
        "explain": ["model", "policy", "machine", "as_json"],
        "verify": ["out", "quick", "only", "timings"],
        "policy check": ["file", "model", "step"],
        "policy init": ["file", "recipe", "force"],
        "policy schema": [],
    }
    found = commands(app)
    assert wanted.items() <= found.items()
    groups = {name.split()[0] for name in set(found) - set(wanted)}
    assert groups <= {"bench", "warmup", "bisect", "calibrate", "export"}


def test_environment():
    from pathlib import Path

    import fp4compile.kernels

    names = set()
    for root in (Path(fp4.__file__).parent, Path(next(iter(fp4compile.kernels.__path__)))):
        for path in root.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            names |= {w.strip("\"'(),[]`:.") for w in text.split() if "FP4COMPILE_" in w}
    assert {n for n in names if "FP4COMPILE_CACHE_DIR" not in n} == set()
