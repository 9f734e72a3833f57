"""What the policy decided for a layer (`Decision`), and the text its module carries (`Stamp`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .kernels.formats import Scheme

_STRICT, _CHAIN, _PLAIN = "strict ", "chain: ", " | "


@dataclass(frozen=True)
class Decision:
    """A scheme, the name it has in the policy, and the rule that chose it, for a person to read."""

    scheme: Scheme
    scheme_name: str
    rule: str


@dataclass(frozen=True)
class Stamp:
    """What to do with a linear that turns out to be in an MLP chain, and with one that does not.

    Only the graph knows about chains, so a stamp carries both answers. ``str(stamp)`` holds the
    schemes and strictness alone: equal texts mean equal graphs.
    """

    chain: Decision
    plain: Decision
    strict: bool = False

    def decision(self, in_chain: bool) -> Decision:
        """The decision that holds for the layer."""
        return self.chain if in_chain else self.plain

    @property
    def original(self) -> bool:
        """True where the layer stays as it is, in a chain or not."""
        return self.chain.scheme.original and self.plain.scheme.original

    def __str__(self) -> str:
        chain, plain = str(self.chain.scheme), str(self.plain.scheme)
        text = chain if chain == plain else f"{_CHAIN}{chain}{_PLAIN}{plain}"
        return _STRICT * self.strict + text

    @staticmethod
    @cache
    def parse(text: str) -> Stamp:
        """The stamp whose text is ``text``; its rules read "stamp"."""
        body = text.removeprefix(_STRICT)
        chain, found, plain = body.removeprefix(_CHAIN).partition(_PLAIN)
        return Stamp(_stamped(chain), _stamped(plain if found else chain), text != body)


def _stamped(text: str) -> Decision:
    scheme = Scheme.parse(text)
    return Decision(scheme, "original" if scheme.original else "stamp", "stamp")
