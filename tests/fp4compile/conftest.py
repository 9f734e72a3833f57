"""Fixtures of the tests that compile models."""

from __future__ import annotations

import pytest
import torch


class Graphs:
    """How many graphs the backend was asked for, and the graphs after the rewrite."""

    def __init__(self):
        self.modules = []

    @property
    def count(self):
        return len(self.modules)

    def new(self):
        """The number since the last question."""
        n, self.modules = len(self.modules), []
        return n


@pytest.fixture
def graphs(monkeypatch):
    import fp4compile.backend as backend

    found, original = Graphs(), backend.compile_graph

    def counting(gm, *args):
        found.modules.append(gm)
        return original(gm, *args)

    monkeypatch.setattr(backend, "compile_graph", counting)
    return found


@pytest.fixture
def fresh():
    """No graphs of other tests; Dynamo's limits as they were."""
    from fp4compile import dynamo

    config = torch._dynamo.config
    torch._dynamo.reset()
    torch.manual_seed(0)
    with config.patch(
        recompile_limit=8, accumulated_recompile_limit=256, suppress_errors=False
    ):
        dynamo._granted[:] = 0, 0
        yield
    dynamo._granted[:] = 0, 0
    torch._dynamo.reset()
