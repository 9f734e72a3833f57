"""What all tests of the kernels share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Most tensors here are small, and threads that wait for each other on a busy machine take most
    of the time. Tests of threads set a number of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
