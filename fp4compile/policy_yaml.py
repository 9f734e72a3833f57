"""YAML text to plain data, with the line of every key; refuses what a policy cannot mean.

Only safe tags (texts, numbers, booleans, null, lists, mappings) are read. Anchors and merge keys
work; duplicate keys, recursive anchors, alias bombs and tags that would build objects are errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.constructor import SafeConstructor

from .kernels.errors import PolicyError
from .words import shown

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}
_MERGE = _TAG + "merge"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Source:
    """A policy's text, the name that errors give it, and the line of every key in it."""

    name: str
    text: str
    lines: dict[KeyPath, int] = field(default_factory=dict, compare=False)

    def known(self, path: KeyPath) -> KeyPath:
        """``path`` without the elements that are not in the file (tags of unions)."""
        kept: KeyPath = ()
        for element in path:
            if (*kept, element) in self.lines:
                kept = (*kept, element)
        return kept

    def line(self, path: KeyPath) -> int:
        """The line of the key at ``path``, or of its nearest ancestor."""
        return self.lines.get(self.known(path), 1)

    def error(self, path: KeyPath, message: str) -> PolicyError:
        """``file:line: keys: message``."""
        keys = dotted(self.known(path))
        return PolicyError(f"{self.name}:{self.line(path)}: {keys}{': ' * bool(keys)}{message}")


def dotted(path: KeyPath) -> str:
    """``("layers", 1, "scheme")`` as ``layers[1].scheme``."""
    text = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return text.removeprefix(".")


def read_text(path: str | Path) -> str:
    """The text of a policy file; `PolicyError` where it is missing, too large or not UTF-8."""
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise PolicyError(f"{path}: {(exc.strerror or str(exc)).lower()}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise PolicyError(f"{path}:{line}: not UTF-8 (byte 0x{data[exc.start]:02x})") from None


def read(text: str, name: str) -> tuple[dict, Source]:
    """The data of a policy and where each key stands."""
    if len(text) > MAX_BYTES:
        raise PolicyError(f"{name}: larger than {MAX_BYTES >> 20} MiB, not a policy")
    source = Source(name, text)
    root = _compose(source)
    if root is None:
        raise PolicyError(f"{name}:1: empty; a policy needs at least `version: 1`")
    if not isinstance(root, yaml.MappingNode):
        raise PolicyError(f"{name}:{_line(root)}: a mapping of keys is needed at the top level")
    return _Reader(source).mapping(root, ()), source


def _compose(source: Source) -> yaml.Node | None:
    try:
        return yaml.compose(source.text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as exc:
        line = source.text.count("\n", 0, exc.position) + 1
        code = exc.character if isinstance(exc.character, int) else ord(exc.character)
        raise PolicyError(f"{source.name}:{line}: character U+{code:04X}: not YAML") from None
    except yaml.MarkedYAMLError as exc:
        raise PolicyError(f"{source.name}:{_error_line(exc)}: {_problem(exc)}") from None
    except RecursionError:
        raise PolicyError(f"{source.name}: nested too deeply for a policy") from None


def _error_line(exc: yaml.MarkedYAMLError) -> int:
    mark = exc.problem_mark or exc.context_mark
    return mark.line + 1 if mark else 1


def _problem(exc: yaml.MarkedYAMLError) -> str:
    problem = " ".join((exc.problem or exc.context or "not YAML").split())
    if "'\\t'" in problem:
        return "a tab; YAML is indented with spaces"
    if "expected a single document" in (exc.context or ""):
        return "a second document (`---`); a policy is one document"
    return f"not YAML: {problem}"


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


class _Reader:
    """Nodes to plain data; fills ``source.lines``."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values = 0
        self.open: set[int] = set()
        self.scalars = SafeConstructor()

    def fail(self, node: yaml.Node, message: str) -> PolicyError:
        return PolicyError(f"{self.source.name}:{_line(node)}: {message}")

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        self.values += 1
        if self.values > MAX_VALUES:
            raise self.fail(node, f"more than {MAX_VALUES} values once its aliases are expanded")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if id(node) in self.open:
            raise self.fail(node, "an anchor that contains itself")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return self.sequence(node, path)
            assert isinstance(node, yaml.MappingNode)  # the only other node with children
            return self.mapping(node, path)
        except RecursionError:
            raise self.fail(node, "nested too deeply for a policy") from None
        finally:
            self.open.discard(id(node))

    def scalar(self, node: yaml.ScalarNode) -> object:
        if node.tag not in _SCALARS:
            raise self.fail(node, f"{_tag(node)} {shown(node.value)} is not allowed here")
        try:
            return self.scalars.construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError):
            raise self.fail(node, f"{shown(node.value)} is no {_tag(node)}") from None

    def sequence(self, node: yaml.SequenceNode, path: KeyPath) -> list:
        if node.tag != _TAG + "seq":
            raise self.fail(node, f"{_tag(node)} is not allowed")
        items = []
        for i, item in enumerate(node.value):
            self.source.lines[(*path, i)] = _line(item)
            items.append(self.value(item, (*path, i)))
        return items

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict:
        if node.tag != _TAG + "map":
            raise self.fail(node, f"{_tag(node)} is not allowed")
        self.refuse_duplicates(node)
        merged: dict = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                for parent in self.parents(value_node):
                    merged = {**self.value(parent, path), **merged}  # type: ignore[dict-item]
        own: dict = {}
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE:
                key = self.key(key_node)
                self.source.lines[(*path, key)] = _line(key_node)
                own[key] = self.value(value_node, (*path, key))
        return {**merged, **own}

    def parents(self, node: yaml.Node) -> list[yaml.Node]:
        """The mappings that a merge key names."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for parent in nodes:
            if not isinstance(parent, yaml.MappingNode):
                raise self.fail(node, "a merge key (<<) takes a mapping")
        return nodes

    def refuse_duplicates(self, node: yaml.MappingNode) -> None:
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.key(key_node)
            if key in first:
                raise self.fail(key_node, f"duplicate key {key!r} (first on line {first[key]})")
            first[key] = _line(key_node)

    def key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(node, "a key must be a text")
        key = self.scalar(node)
        if not isinstance(key, str):
            raise self.fail(node, f"key {node.value} must be a text; quote it")
        return key


def _tag(node: yaml.Node) -> str:
    """The node's tag in the spelling of a YAML file."""
    return node.tag.replace(_TAG, "!!")
