"""Run a script of this folder as two processes that talk by gloo, and collect what each found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
WORLD = 2


def launch(script: str, folder: Path) -> list[dict]:
    """The results of all ranks of ``script``, which calls `report`."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "fp4compile")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(WORLD)]
    ranks = [
        subprocess.Popen([sys.executable, str(HERE / script), str(rank), str(folder)],
                         env=env, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        codes = [process.wait(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    texts = [log.seek(0) or log.read() for log in logs]
    assert codes == [0] * WORLD, "\n".join(texts)[-6000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def report(cases: dict[str, Callable[[int, Path], dict]]) -> None:
    """In a script: every case on this rank, from fresh graphs, and its result to the test."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found = {}
    for name, case in cases.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        found[name] = case(rank, folder)
        dist.barrier()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
