"""Whether autocast is on at a node: around the compiled call, or entered in the graph itself."""

from __future__ import annotations

import torch
from torch.amp.autocast_mode import _enter_autocast
from torch.fx import Node

from .names import Callers
from .nodes import op


def autocast_at(node: Node, device: str, calls: Callers) -> bool:
    """True where the operation of ``node`` on tensors of a device type runs under autocast.

    ``calls`` are the callers of each inner graph, whose bodies run in the state of their call.
    """
    entered = node.graph.find_nodes(op="call_function", target=_enter_autocast)
    for enter in reversed(entered):
        is_open = enter < node and not any(leave < node for leave in enter.users)
        if is_open and enter.args[0] == device:
            return bool(enter.args[2])
    gm = node.graph.owning_module
    for _, _, call in calls[gm][:1] if gm in calls else ():
        if op(call) == "wrap_with_autocast" and call.args[0] == device:
            return bool(call.args[2])
        return autocast_at(call, device, calls)
    return torch.is_autocast_enabled(device)
