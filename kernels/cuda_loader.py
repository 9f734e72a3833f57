"""Compiles the CUDA kernels at first use (NVRTC), caches the cubins on disk, launches them.

Everything goes through `cuda.bindings`, which CUDA builds of PyTorch depend on; it is imported when
first needed. Nothing here raises on a machine without a GPU, driver or library: `available` gives
the reason in one line. `load` before a CUDA-graph capture; `launch` of a loaded kernel allocates
nothing and does not wait.
"""

from __future__ import annotations

import ctypes
from functools import cache as cache_function
from pathlib import Path
from typing import Any

import torch

from . import cache
from .errors import EngineError

HERE = Path(__file__).parent / "cuda"
HEADERS = tuple(sorted(path.name for path in HERE.glob("*.cuh")))
# No contraction: where the kernels want a multiply-add they say so. FTZ stays off, division exact.
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")

Defines = tuple[tuple[str, int], ...]


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of a compute capability, with its own instructions from 9.0 on."""
    number = capability[0] * 10 + capability[1]
    return f"sm_{number}{'a' if number >= 90 else ''}"


@cache_function
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc  # type: ignore[import-not-found, unused-ignore]

    nvrtc.nvrtcVersion()  # finds the library, or raises
    return nvrtc


@cache_function
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def compiler_available() -> tuple[bool, str]:
    """Whether NVRTC can be loaded; else the reason, one line. No GPU is needed."""
    try:
        _nvrtc()
    except Exception as error:
        return False, f"NVRTC: {_one_line(error)}"
    return True, ""


@cache_function
def available(device: int = 0) -> tuple[bool, str]:
    """Whether the kernels run on CUDA device ``device``; else the reason, one line."""
    if not torch.cuda.is_available():
        return False, "no CUDA device (torch.cuda.is_available() is false)"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return False, f"compute capability {capability[0]}.{capability[1]}; 8.0 or later is needed"
    found, reason = compiler_available()
    if not found:
        return False, reason
    try:
        _check(_driver().cuInit(0))
        load("tensors.cu", "tensor_amax", (("XD", 1), ("OPERAND", 0)), device)
    except Exception as error:
        return False, _one_line(error)
    return True, ""


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _check(reply: tuple) -> Any:
    """The result of a `cuda.bindings` call; `EngineError` for any status but success."""
    status, *results = reply
    if int(status) != 0:
        raise EngineError(f"CUDA: {status.name}")
    return results[0] if results else None


def _read(count: Any, size: Any, fill: Any) -> bytes:
    buffer = bytearray(_check(size(count)))
    _check(fill(count, buffer))
    return bytes(buffer)


def build(file: str, defines: Defines, arch: str) -> bytes:
    """The cubin of one source file; `EngineError` with the compiler's first complaint."""
    nvrtc = _nvrtc()
    source, texts = (HERE / file).read_bytes(), [(HERE / name).read_bytes() for name in HEADERS]
    names = [name.encode() for name in HEADERS]
    program = _check(nvrtc.nvrtcCreateProgram(source, file.encode(), len(names), texts, names))
    try:
        options = [o.encode() for o in _options(defines, arch)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            lines = log.decode(errors="replace").strip("\0").splitlines()
            first = next((line for line in lines if "error" in line), status.name)
            raise EngineError(f"{file} for {arch}: {first}")
        return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _options(defines: Defines, arch: str) -> list[str]:
    return [
        f"--gpu-architecture={arch}",
        *OPTIONS,
        *(f"-D{name}={value}" for name, value in sorted(defines)),
    ]


@cache_function
def version() -> str:
    """NVRTC's, such as "13.0"."""
    return ".".join(str(v) for v in _nvrtc().nvrtcVersion()[1:])


def cubin(file: str, defines: Defines, arch: str) -> bytes:
    """As `build`, through the cache on disk."""
    sources = [(HERE / name).read_bytes() for name in (file, *HEADERS)]
    key = cache.key(*sources, *_options(defines, arch), version())
    path = cache.fetch(f"{Path(file).stem}-{arch}-{key}.cubin", lambda: build(file, defines, arch))
    payload = cache.read(path)
    return payload if payload is not None else build(file, defines, arch)


@cache_function
def _module(file: str, defines: Defines, device: int) -> Any:
    arch = architecture(torch.cuda.get_device_capability(device))
    with torch.cuda.device(device):
        torch.empty(1, device="cuda")  # the device's context exists and is current
        return _check(_driver().cuModuleLoadData(cubin(file, defines, arch)))


@cache_function
def load(file: str, kernel: str, defines: Defines, device: int) -> Any:
    """The function ``kernel`` of a source file with these defines, on a device; kept."""
    return _check(_driver().cuModuleGetFunction(_module(file, defines, device), kernel.encode()))


@cache_function
def processors(device: int) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


STATIC_SHARED = 8 << 10  # what the kernels' tables take, generously


@cache_function
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a CTA may ask for beside the kernels' tables."""
    if device.type != "cuda":
        return 192 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin) - STATIC_SHARED


@cache_function
def _granted(function: Any, shared: int) -> None:
    """Allow a kernel more shared memory than the 48 KiB that need no asking."""
    if shared > 48 * 1024:
        attribute = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(_driver().cuFuncSetAttribute(function, attribute, shared))


@cache_function
def resident(
    file: str, kernel: str, defines: Defines, threads: int, device: int, shared: int = 0
) -> int:
    """CTAs of ``threads`` threads that run at once on a device: the grid of a persistent kernel."""
    function = load(file, kernel, defines, device)
    _granted(function, shared)
    occupancy = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
    return max(1, _check(occupancy(function, threads, shared))) * processors(device)


def launch(
    file: str,
    kernel: str,
    defines: Defines,
    arguments: ctypes.Structure,
    grid: tuple[int, int],
    threads: int,
    device: torch.device,
    shared: int = 0,
) -> None:
    """Run ``kernel`` on the device's current stream; ``arguments`` is its only parameter.

    ``shared``: bytes of dynamic shared memory a CTA.
    """
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    function = load(file, kernel, defines, index)
    _granted(function, shared)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    stream = torch.cuda.current_stream(index).cuda_stream
    geometry = (*grid, 1, threads, 1, 1, shared, stream, ctypes.addressof(parameters), 0)
    if index == current:
        _check(_driver().cuLaunchKernel(function, *geometry))
        return
    with torch.cuda.device(index):
        _check(_driver().cuLaunchKernel(function, *geometry))
