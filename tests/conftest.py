"""Long files first: the processes of pytest-xdist take whole files, and then end together."""

from __future__ import annotations

LONG = ("test_cuda_emulated.py", "test_cuda_compile.py", "test_backend_watch.py", "test_fsdp2.py")


def pytest_collection_modifyitems(items):
    """Keep the order within files."""
    items.sort(key=lambda item: item.path.name not in LONG)
