"""A key for the on-disk compile caches: they do not know this package's sources.

A changed backward formula would otherwise still be served from AOTAutograd's cache, and so would a
graph for tensor cores that another cuBLAS does not drive.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass

SUFFIXES = {".py", ".yaml", ".cuh", ".cu", ".cpp", ".h"}


@functools.cache
def source_hash() -> bytes:
    """SHA-256 over every source, recipe and kernel of the package, names and contents."""
    from . import kernels, passes

    roots = [Path(next(iter(p.__path__))) for p in (kernels, passes)]
    roots.insert(0, Path(__file__).parent)
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    return digest.digest()


def engine_answers() -> tuple[str, ...]:
    """What the block-scaled engines answered on the current device: engines are in the graphs."""
    import torch

    from .kernels import block_scaled

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(block_scaled.refusal(form, device) for form in block_scaled.FORMS)


class KeyedPass(CustomGraphPass):
    """A graph pass known by the package's sources, the policy, engines and the pass it wraps."""

    def __init__(self, policy: str, function: Any = None, wrapped: Any = None) -> None:
        """``function`` and then ``wrapped`` (the user's own pass) are called with the graph."""
        self.functions = [f for f in (function, wrapped) if f is not None]
        wrapped_id = wrapped.uuid() if isinstance(wrapped, CustomGraphPass) else None
        name = getattr(function, "__name__", "")
        self.key = (source_hash(), policy, engine_answers(), name, wrapped_id)
        # a user's pass without a uuid cannot be cached: Inductor must bypass its cache.
        self.cacheable = wrapped is None or wrapped_id is not None

    def __call__(self, graph: Any) -> None:
        """Run the passes on ``graph``."""
        for function in self.functions:
            function(graph)

    def uuid(self) -> Any:
        """The cache key; None bypasses the cache."""
        return self.key if self.cacheable else None
