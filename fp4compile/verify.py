"""`fp4compile verify`: check and time this machine, and write a report to send back."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .kernels import cuda_loader, fallback
from .kernels.errors import InputError, PrecisionWarning
from .verify_cases import Wrong
from .verify_checks import Check, all_checks

WORKERS = 14  # processes; a GPU's driver and PyTorch take 1 GiB each


@dataclass
class Verification:
    """What `verify` found; ``data`` is the JSON report."""

    data: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> list[dict]:
        """The checks that failed or broke."""
        return [c for c in self.data["checks"] if c["status"] in ("fail", "error")]

    def counts(self) -> dict[tuple[str, str], Counter[str]]:
        """How many checks of each device and group have each status."""
        found: dict[tuple[str, str], Counter[str]] = {}
        for check in self.data["checks"]:
            key = check["device"], check["group"]
            found.setdefault(key, Counter())[check["status"]] += 1
        return found

    def save(self, path: Path) -> None:
        """Write the report."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.data, indent=1) + "\n")


def about() -> dict[str, Any]:
    """The machine, its driver and the versions of what runs on it."""
    from . import __version__

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "fp4compile": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count(),
    }  # fmt: skip
    if not torch.cuda.is_available():
        return found
    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability(0)
    return {
        **found, "gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(),
        "capability": f"{major}.{minor}", "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda,
        "driver": _driver(), "nvrtc": cuda_loader.version(),
    }  # fmt: skip


def _driver() -> str:
    """The CUDA version that the driver supports, and the driver's own where it says it."""
    try:
        from cuda.bindings import driver

        version = int(driver.cuDriverGetVersion()[1])
        text = f"CUDA {version // 1000}.{version % 1000 // 10}"
    except Exception as exc:  # noqa: BLE001 - the report says so and goes on
        text = f"unknown ({type(exc).__name__})"
    own = Path("/proc/driver/nvidia/version")
    return f"{text}; {own.read_text().splitlines()[0]}" if own.exists() else text


def devices() -> tuple[list[torch.device], list[dict]]:
    """Devices with kernels to check, and what is not run with the reason."""
    found, missing = [], []
    if fallback.native_for(torch.device("cpu")) is not None:
        found.append(torch.device("cpu"))
    else:
        from .kernels import native

        missing.append({"what": "CPU kernels", "why": native.available()[1]})
    usable, reason = cuda_loader.available()
    if usable:
        found.append(torch.device("cuda", 0))
    else:
        missing.append({"what": "CUDA kernels, engines on the GPU", "why": reason})
    return found, missing


def outcome(check: Check, device: str) -> dict:
    """The result of one check; whatever it raises is part of the report."""
    result = {"device": device, "group": check.group, "name": check.name}
    if check.missing:
        return {**result, "status": "not run", "detail": check.missing}
    try:
        check.run()
    except Wrong as wrong:
        return {**result, "status": "fail", "detail": str(wrong)}
    except Exception as exc:  # noqa: BLE001 - one check that breaks leaves the others' results
        text = " ".join(f"{type(exc).__name__}: {exc}".split())
        return {**result, "status": "error", "detail": text[:400]}
    return {**result, "status": "pass"}


def prepare(threads: int) -> None:
    """In a process of its own: uninitialized memory holds NaN from here on, nothing may read it."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def run_checks(
    found: list[torch.device], only: str = "", processes: int | None = None
) -> Iterator[dict]:
    """The outcomes of all devices' checks; ``only``: those with this text in group or name.

    ``processes``: that run them side by side, default one a CPU; 0: here. A fault that kills one
    of them leaves the others' checks.
    """
    every = ((device, check) for device in found for check in all_checks(device))
    todo = [(check, str(d)) for d, check in every if only in f"{check.group} {check.name}"]
    if only and found and not todo:
        raise InputError(f"no check has {only!r} in its group or name")
    cpus = os.cpu_count() or 1
    workers = min(WORKERS, cpus) if processes is None else processes
    if not workers:
        yield from (outcome(*pair) for pair in todo)
        return
    context, threads = multiprocessing.get_context("spawn"), max(1, cpus // workers)
    with ProcessPoolExecutor(workers, context, prepare, (threads,)) as pool:
        futures = [pool.submit(outcome, *pair) for pair in todo]
        for (check, device), future in zip(todo, futures):
            try:
                yield future.result()
            except BrokenExecutor as exc:
                detail = f"a process ended: {type(exc).__name__}"
                base = {"device": device, "group": check.group, "name": check.name}
                yield {**base, "status": "error", "detail": detail}


def verify(
    quick: bool = False, out: Path | None = None, only: str = "", tables: tuple[str, ...] = (),
    progress: Callable[[str], None] | None = None, processes: int | None = None,
) -> Verification:  # fmt: skip
    """Check every device of this machine, then time its GPU; the report is saved as it grows.

    ``quick``: no timings. ``only``: checks with this text in their group or name. ``tables``: of
    timings, default all. ``progress(text)`` is called now and then. ``processes``: see
    `run_checks`.
    """
    from . import verify_timings

    result = Verification({"verify": 1, "machine": about(), "checks": [], "timings": []})
    found, result.data["not_run"] = devices()

    def grown(text: str) -> None:
        if out is not None:
            result.save(out)
        if progress is not None:
            progress(text)

    for i, check in enumerate(run_checks(found, only, processes)):
        result.data["checks"].append(check)
        if i % 20 == 0:
            grown(f"{i} checks: {check['device']} {check['group']} {check['name']}")
    grown("timings")
    gpu = any(device.type == "cuda" for device in found)
    if quick or not gpu:
        why = "--quick" if quick else "they are about GPU kernels, and there is no usable GPU"
        result.data["not_run"].append({"what": "timings", "why": why})
    for name, table in verify_timings.TABLES.items() if gpu and not quick else ():
        if tables and name not in tables:
            result.data["not_run"].append({"what": f"timings of {name}", "why": "not asked for"})
            continue
        for each in _timed(name, table):
            result.data["timings"].append(each)
            grown(each["what"])
    grown("done")
    return result


def _timed(name: str, table: Callable[[], Iterator[dict]]) -> Iterator[dict]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            for each in table():
                yield {"table": name, **each}
    except Exception as exc:  # noqa: BLE001 - one table that breaks leaves the others'
        text = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
        yield {"table": name, "what": name, "error": text}
    finally:
        torch.cuda.empty_cache()
