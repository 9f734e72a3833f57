"""Who looks at what the primitives did: nobody, but for the sampled steps of `fp4.monitor`.

An observer is called with a primitive's name, its arguments and its results, on the host, after the
primitive's own work was issued. Graphs do not change with it. CUDA graphs replay kernels without
the primitives' Python: nothing is observed then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Observer = Callable[[str, tuple, Any], None]
observers: list[Observer] = []


def tell(name: str, args: tuple, result: Any) -> None:
    """Tell all observers what the primitive ``name`` did."""
    for observer in tuple(observers) if observers else ():
        observer(name, args, result)


def observed(name: str, function: Callable) -> Callable:
    """``function``, the primitive ``name``, which tells the observers that there are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        tell(name, args, result)
        return result

    return call
