"""Policies from files, and graphs that outlive the version of the file they were compiled from.

`torch.compile` compares options, and of a policy file these hold the path: an edited file compiles
nothing again. So each graph knows the text that it follows, looks at the file when it runs, at most
once a second, and says once when the file would decide otherwise by now.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from .kernels.errors import PolicyError
from .notices import warn
from .policy import Policy, recipes
from .policy_yaml import read_text
from .words import nearest

SECONDS = 1.0


def named(path: str) -> Policy:
    """The policy in a file; the recipe of that name where there is no such file.

    Raises:
        PolicyError: where there is neither, with the nearest recipe.
    """
    if os.path.isfile(path) or path not in recipes():
        return _parse(_read(path), path)
    return Policy.recipe(path)


def _read(path: str) -> str:
    if not os.path.exists(path):
        near = nearest(path, recipes())
        advice = f"; did you mean the recipe {near!r}?" if near else ""
        raise PolicyError(f"{path}: no such file{advice}")
    return read_text(path)


@lru_cache(maxsize=32)
def _parse(text: str, path: str) -> Policy:
    return Policy.parse(text, path)


@dataclass(eq=False)
class _Version:
    """A text that a file had, what it decides, and the graphs compiled from it."""

    path: str
    text: str
    decides: str
    graphs: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    looked: float = 0.0
    told: bool = False

    def look(self) -> None:
        """Read the file again, unless that was done within the last second."""
        now = time.monotonic()
        if self.told or now - self.looked < SECONDS:
            return
        self.looked = now
        try:
            text = read_text(self.path)
            if text == self.text or str(_parse(text, self.path)) == self.decides:
                return
        except PolicyError:
            if not os.path.exists(self.path):
                return
        self.tell()

    def tell(self) -> None:
        """Say once that the file is another by now."""
        if not self.told:
            self.told = True
            warn(
                f"{self.path} has changed since graphs were compiled from it: these keep the old"
                " policy, later ones follow the new; torch._dynamo.reset() compiles all again",
                once=False,
            )


_newest: dict[str, _Version] = {}


def follow(policy: Policy, compiled: Callable) -> Callable:
    """``compiled``, which says so when it runs after its policy's file has changed."""
    path = os.path.abspath(policy.name)
    version = _newest.get(path)
    if version is None or version.text != policy.text:
        before, version = version, _Version(path, policy.text, str(policy))
        _newest[path] = version
        if before is not None and before.graphs and before.decides != version.decides:
            before.tell()
    version.looked = time.monotonic()

    def call(*args: Any) -> Any:
        version.look()
        return compiled(*args)

    version.graphs.add(call)
    return call
