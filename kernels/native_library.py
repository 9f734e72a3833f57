"""Builds `native.cpp` once with the machine's compiler, loads it, and describes its arguments.

The library lies in the cache directory (`cache`); its key holds the sources, the flags, the
compiler and the processor's features, so nothing stale or foreign is loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

from . import cache

HERE = Path(__file__).parent
SOURCES = (
    "native.cpp",
    "native_quantize.h",
    "native_search.h",
    "native_rows.h",
    "cuda/numerics.cuh",
)
# -ffp-contract=off and no -ffast-math: the order of operations is part of the format.
FLAGS = "-std=c++17 -O3 -fPIC -shared -pthread -fno-math-errno -fno-trapping-math -ffp-contract=off"
NATIVE = FLAGS + " -march=native"
FLAG_SETS = (NATIVE + " -mprefer-vector-width=512", NATIVE, FLAGS)  # the first that compiles


def compiler() -> list[str] | None:
    """The C++ compiler's command: $CXX, else c++, g++ or clang++; None where there is none."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in [configured] if configured else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return None


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    words = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(words)}))


def _compile(command: list[str]) -> bytes:
    """The shared library's bytes; `RuntimeError` with the compiler's first complaint."""
    with tempfile.TemporaryDirectory(prefix="fp4compile-") as where:
        out = Path(where) / "native.so"
        for flags in FLAG_SETS:
            files = ["-I", str(HERE), str(HERE / SOURCES[0]), "-o", str(out)]
            done = subprocess.run(
                [*command, *flags.split(), *files], capture_output=True, text=True
            )
            if done.returncode == 0:
                return out.read_bytes()
    complaints = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    raise RuntimeError((complaints or done.stderr.splitlines() or ["no message"])[0])


@lru_cache(maxsize=1)
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, built if need be; or None and the reason in one line."""
    command = compiler()
    if command is None:
        return None, "no C++ compiler ($CXX, c++, g++, clang++): the PyTorch reference is used"
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
        sources = [(HERE / name).read_bytes() for name in SOURCES]
        machine = (platform.machine(), _cpu_features())
        key = cache.key(*sources, *FLAG_SETS, *command, version, *machine)
        return open_library(f"native-{key}.so", command), ""
    except (OSError, RuntimeError) as error:
        return None, f"{command[0]}: {' '.join(str(error).split())[:300]}"


def open_library(name: str, command: list[str]) -> ctypes.CDLL:
    """The cache entry ``name`` as a library, compiled with ``command`` where need be."""
    try:
        library = ctypes.CDLL(str(cache.fetch(name, lambda: _compile(command))))
    except OSError:  # intact but not loadable here, from another C library say
        library = ctypes.CDLL(str(cache.fetch(name, lambda: _compile(command), force=True)))
    for function, argument in (("quantize", Quantize), ("decode", Decode), ("gradient", Gradient)):
        getattr(library, f"fp4_{function}").argtypes = [POINTER(argument)]
        getattr(library, f"fp4_{function}").restype = None
    return library


# ---- arguments, field by field as in native.cpp -----------------------------------------------


def _fields(integers: str, pointers: str, floats: str = "") -> list[tuple[str, type]]:
    typed = ((integers, c_int64), (pointers, c_void_p), (floats, c_float))
    return [(name, kind) for names, kind in typed for name in names.split()]


class Matrix(ctypes.Structure):
    """A matrix whose rows are `ld` elements apart."""

    _fields_ = _fields("", "data") + _fields("rows cols ld dtype", "")


class Quantize(ctypes.Structure):
    """Arguments of `fp4_quantize`."""

    _fields_ = [
        ("x", Matrix),
        *_fields(
            "transpose kind search tile outer_row stochastic group threads"
            " random_rows random_ld stream n_factors",
            "factors seed random16 codes scales outer values",
            "bound",
        ),
    ]


class Decode(ctypes.Structure):
    """Arguments of `fp4_decode`."""

    _fields_ = (
        _fields("", "codes scales")
        + _fields("rows padded cols kind unit transpose threads", "")
        + _fields("", "values")
    )


class Side(ctypes.Structure):
    """One orientation of a gradient."""

    _fields_ = _fields("kind group stochastic", "values factor")


class Gradient(ctypes.Structure):
    """Arguments of `fp4_gradient`."""

    _fields_ = [
        ("g", Matrix),
        *_fields("threads stream", "seed fold"),
        ("d", Side),
        ("w", Side),
        *_fields("", "sums"),
    ]
