"""The ways to train share the models of the backend's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fp4compile"))


@pytest.fixture(autouse=True)
def fresh():
    """No graphs of other tests; Dynamo's limits as they were."""
    from fp4compile import dynamo

    config = torch._dynamo.config
    torch._dynamo.reset()
    torch.manual_seed(0)
    with config.patch(recompile_limit=8, accumulated_recompile_limit=256, suppress_errors=False):
        dynamo._granted[:] = 0, 0
        yield
    dynamo._granted[:] = 0, 0
    torch._dynamo.reset()
