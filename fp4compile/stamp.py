"""What the policy decided for a layer (`Decision`), and the text its module carries (`Stamp`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .kernels.formats import Scheme

_STRICT, _CHAIN, _PLAIN, _AUTO = "strict ", "chain: ", " | ", "auto("


@dataclass(frozen=True)
class Decision:
    """A scheme, the name it has in the policy, and the rule that chose it, for a person to read.

    ``auto``: the graph decides by the layer's size whether the scheme holds or the layer stays as
    it is (`predicting`), for the machine of this name, "" for the present one; else None.
    """

    scheme: Scheme
    scheme_name: str
    rule: str
    auto: str | None = None

    @property
    def text(self) -> str:
        """The decision in a stamp."""
        return str(self.scheme) if self.auto is None else f"{_AUTO}{self.auto}) {self.scheme}"


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
        chain, plain = self.chain.text, self.plain.text
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
    auto = None
    if text.startswith(_AUTO):
        auto, _, text = text.removeprefix(_AUTO).partition(") ")
    scheme = Scheme.parse(text)
    return Decision(scheme, "original" if scheme.original else "stamp", "stamp", auto)
