"""The policy: which scheme each layer of a model gets, from a YAML file over a recipe.

    Policy.load / recipe / parse / default    text -> rules, schemes, phases
    policy.resolve(model, step)               every linear's stamp, and what to warn about
    policy.stamp_for(name, block, step)       one layer's stamp, without the model

The keys of the file: docs/policy.md. Reading YAML: policy_yaml.py; keys and types: policy_model.py;
schemes and phases: policy_schemes.py; selectors: policy_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path

import yaml
from torch import nn

from .blocks import Blocks, clean_name, find_blocks, linears, other_names
from .kernels.errors import InputError, PolicyError
from .kernels.formats import PREACTIVATION, Scheme
from .passes import machines
from .policy_model import AUTO, PolicyEntry, validate
from .policy_rules import Block, Named, Rule, rules_of
from .policy_schemes import BUILT_IN, Phase, check_phase, phases_of, scheme_of
from .policy_yaml import KeyPath, Source, read, read_text
from .stamp import Decision, Stamp
from .words import hint, shown, unknown

DEFAULT_RECIPE = "fp8-exact"
BLOCK_ADVICE = "when compiling block by block, call fp4.apply(model, policy) on the whole model"


def recipes() -> list[str]:
    """The names of the recipes in the package."""
    files = (resources.files(__package__) / "recipes").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The YAML of a recipe; KeyError where there is none."""
    if name not in recipes():
        raise KeyError(name)
    file = resources.files(__package__) / "recipes" / f"{name}.yaml"
    return file.read_text(encoding="utf-8")


@cache
def _recipe(name: str) -> tuple[PolicyEntry, Source]:
    data, source = read(recipe_text(name), f"recipes/{name}.yaml")
    return validate(data, source), source


class Resolution(dict[str, Stamp]):
    """Layer name -> stamp, for every linear of a model; a tied module is there under each name.

    ``modules``: the same by module, complete where two names fall together once wrappers are
    stripped. ``warnings``: one line each, for the caller to print.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[nn.Module, Stamp] = {}
        self.warnings: list[str] = []


@dataclass(frozen=True)
class Policy:
    """Rules, schemes and phases; immutable. Made by `load`, `recipe`, `parse` or `default`."""

    name: str
    text: str = field(repr=False)
    recipe_name: str
    strict: bool
    save_weight: str
    rules: tuple[Rule, ...] = field(repr=False)
    default_rule: tuple[str, str] = field(repr=False)
    schemes: Mapping[str, Scheme] = field(repr=False, compare=False)
    phases: tuple[Phase, ...] = field(repr=False)
    machine: str = ""

    @staticmethod
    def load(path: str | Path) -> Policy:
        """The policy in a file; `PolicyError` names file, line and word."""
        return Policy.parse(read_text(path), str(path))

    @staticmethod
    def recipe(name: str) -> Policy:
        """A recipe as it is, without rules of the user's."""
        if name not in recipes():
            raise PolicyError(unknown("recipe", name, recipes()))
        return Policy.parse(f"version: 1\nrecipe: {name}\n", f"recipe {name}")

    @staticmethod
    def default() -> Policy:
        """The policy where none is given: the recipe fp8-exact."""
        return Policy.recipe(DEFAULT_RECIPE)

    @staticmethod
    def from_dict(data: Mapping) -> Policy:
        """The policy of plain data with the keys of a policy file."""
        try:
            text = yaml.safe_dump(dict(data), sort_keys=False)
        except yaml.YAMLError as exc:
            raise PolicyError(f"<dict>: not plain data: {shown(exc.args[-1])}") from None
        return Policy.parse(text, "<dict>")

    @staticmethod
    def parse(text: str, name: str = "<string>") -> Policy:
        """The policy of a YAML text; ``name`` is what errors call it."""
        data, source = read(text, name)
        return _build(validate(data, source), source)

    def save(self, path: str | Path) -> None:
        """Writes the policy as it was read, comments included."""
        try:
            Path(path).write_bytes(self.text.encode())
        except OSError as exc:
            raise PolicyError(f"{path}: {(exc.strerror or str(exc)).lower()}") from None

    def stamp_for(self, fqn: str, block: Block = None, step: int | None = None) -> Stamp:
        """The stamp of the layer ``fqn`` in block (index, count) of its model, at a step."""
        return self._stamp([(clean_name(fqn), block)], step)

    def resolve(self, model: nn.Module, step: int | None = None) -> Resolution:
        """The stamps of every linear of ``model`` at ``step`` (None: the first).

        `PolicyError` for a rule of the user's with ``blocks:`` where the model has no blocks and,
        if the policy is strict, for a rule that holds for no layer. Other matrices that the model
        may multiply by (`blocks.other_names`) are layers to a rule, but have no entry here.
        """
        result = Resolution()
        result.warnings += self.check_blocks(model)
        blocks = find_blocks(model)
        layers = {module: _named(names, blocks) for module, names in linears(model).items()}
        for module, named in layers.items():
            stamp = self._stamp(named, step)
            result.modules[module] = stamp
            result.update((name, stamp) for name, _ in named)
        others = other_names(model)
        matrices = [_named([name], blocks) for name in others]
        result.warnings += self._unused([*layers.values(), *matrices], [*result, *others])
        return result

    def check_blocks(self, model: nn.Module) -> list[str]:
        """Warnings about ``blocks:`` rules of the recipe where ``model`` has no repeated blocks.

        `PolicyError` where the rule is the user's.
        """
        rules = [rule for rule in self.rules if rule.span]
        if not rules or find_blocks(model):
            return []
        rest = [rule for rule in self.rules if rule.match == "*" and rule.selectors == 'match "*"']
        if rest and rules[0].own and self.rules.index(rest[0]) < self.rules.index(rules[0]):
            return []  # no layer reaches the recipe's rule
        missing = f"no repeated blocks in {type(model).__name__}; {BLOCK_ADVICE} first"
        for rule in rules:
            if not rule.own:
                raise PolicyError(f"rule `blocks: {rule.blocks}` ({rule.where}): {missing}")
        return [f"rule `blocks: {rules[0].blocks}` ({rules[0].where}): {missing}"]

    def _unused(self, layers: list[Named], names: list[str]) -> list[str]:
        warnings = []
        for rule in self.rules:
            if rule.own or any(rule.holds(named) for named in layers):
                continue
            near = hint(rule.match, names) if rule.match and rule.match not in names else ""
            warnings.append(f"{rule}: holds for no layer{near}")
        if warnings and self.strict:
            raise PolicyError(warnings[0])
        return warnings

    def _stamp(self, named: Named, step: int | None) -> Stamp:
        chain = None
        for rule in self.rules:
            if not rule.holds(named):
                continue
            decision = self._decision(rule.scheme, str(rule), step)
            if rule.chain is None:
                return Stamp(chain or decision, decision, self.strict)
            chain = chain or decision
        decision = self._decision(*self.default_rule, step)
        return Stamp(chain or decision, decision, self.strict)

    def _decision(self, name: str, rule: str, step: int | None) -> Decision:
        scheme, phase = self.schemes[name], self.phase(step)
        auto = self.machine if name == AUTO else None
        name = "original" if scheme.original else name
        if phase is None or scheme.original:
            return Decision(scheme, name, rule, auto)
        changed = phase.apply(scheme, self.schemes)
        name = phase.whole or f"{name}, {phase}"
        name = "original" if changed.original else name
        reason = f"{rule}; from step {phase.from_step} ({phase.where}) {phase}"
        return Decision(changed, name, reason, None if phase.whole or changed.original else auto)

    def phase(self, step: int | None) -> Phase | None:
        """The phase that ``step`` is in (None: the first step)."""
        begun = None
        for phase in self.phases:
            if phase.share is not None:
                if step is not None:
                    raise PolicyError(
                        f"{phase.where}: from_step: {phase.from_step}: say of how many steps:"
                        " fp4.apply(model, policy.for_steps(10_000), step=n)"
                    )
                start = 0 if phase.share == 0 else 1
            else:
                start = int(phase.from_step)
            begun = phase if start <= (step or 0) else begun
        return begun

    def for_steps(self, steps: int) -> Policy:
        """The policy for a training run of ``steps`` steps: phases given in percent begin there.

        `PolicyError` for a number of steps below 1.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise PolicyError(f"for_steps: a whole number of steps is needed, not {shown(steps)}")
        phases = tuple(
            phase if phase.share is None else replace(phase, from_step=round(phase.share * steps))
            for phase in self.phases
        )
        return replace(self, phases=phases)

    def __str__(self) -> str:
        """Everything that decides a layer's bits, schemes spelled out; equal for equal policies."""
        lines = [f"strict {self.strict}, save_weight {self.save_weight}"]
        lines += [f"{rule.selectors}: {self._spelled(rule.scheme)}" for rule in self.rules]
        lines += [f"default: {self._spelled(self.default_rule[0])}"]
        for phase in self.phases:
            names = sorted({phase.whole, *phase.gemms.values()} - {None})  # type: ignore[type-var]
            texts = "; ".join(str(self.schemes[name]) for name in names)  # type: ignore[index]
            lines += [f"from step {phase.from_step}: {phase}: {texts}"]
        return "\n".join(lines)

    def _spelled(self, name: str) -> str:
        return f"auto({self.machine}) " * (name == AUTO) + str(self.schemes[name])


def _named(names: list[str], blocks: Blocks | None) -> Named:
    return [(name, blocks.block_of(name) if blocks else None) for name in names]


def _build(entry: PolicyEntry, source: Source) -> Policy:
    recipe = DEFAULT_RECIPE if entry.recipe is None else entry.recipe
    if recipe not in recipes():
        raise source.error(("recipe",), unknown("recipe", recipe, recipes()))
    base, base_source = _recipe(recipe)
    label = Path(source.name).name
    schemes = {**BUILT_IN, **_schemes(base, base_source), **_schemes(entry, source)}
    rules = rules_of(entry.layers or [], source, label, own=False)
    if entry.save_preactivation == "mxfp8":
        schemes = {
            name: scheme if scheme.original else replace(scheme, preactivation=PREACTIVATION)
            for name, scheme in schemes.items()
        }
    schemes[AUTO] = schemes["low"]
    _check_names(entry, source, schemes)
    _check_auto(entry, source, schemes, recipe)
    rules += rules_of(base.layers or [], base_source, recipe, own=True)
    phases = phases_of(entry.phases or [], source, schemes, label)
    own_default = (base.default or "original", f"recipe {recipe}: default")
    default = _default(entry, source, label) or own_default
    used = dict.fromkeys([*(rule.scheme for rule in rules), default[0]])
    for index, phase in enumerate(phases):
        check_phase(phase, index, used, schemes, source)
    if entry.save_weight == "remake":
        raise source.error(("save_weight",), "remake is not available in this release; use codes")
    return Policy(
        name=source.name,
        text=source.text,
        recipe_name=recipe,
        strict=entry.strict,
        save_weight=entry.save_weight,
        rules=rules,
        default_rule=default,
        schemes=schemes,
        phases=phases,
        machine=_machine(entry, source),
    )


def _machine(entry: PolicyEntry, source: Source) -> str:
    """The name of the machine that `auto` is for, as the cost model spells it."""
    if entry.machine is None:
        return ""
    try:
        return machines.named(entry.machine).name
    except InputError:
        message = unknown("machine", entry.machine, machines.MACHINES)
        raise source.error(("machine",), message) from None


def _check_auto(
    entry: PolicyEntry, source: Source, schemes: Mapping[str, Scheme], recipe: str
) -> None:
    """`auto` chooses between two schemes: `low` must be one."""
    for path, name in _named_schemes(entry):
        if name == AUTO and schemes[AUTO].original:
            raise source.error(path, f"auto: `low` of recipe {recipe} is original: no choice")


def _default(entry: PolicyEntry, source: Source, label: str) -> tuple[str, str] | None:
    """(scheme, where) of the file's own default."""
    if entry.default is None:
        return None
    return entry.default, f"{label}:{source.line(('default',))} default"


def _schemes(entry: PolicyEntry, source: Source) -> dict[str, Scheme]:
    schemes = {}
    for name, scheme in (entry.schemes or {}).items():
        if name in BUILT_IN or name == AUTO:
            raise source.error(("schemes", name), f"{name!r} is built in; choose another name")
        schemes[name] = scheme_of(scheme, source, ("schemes", name))
    return schemes


def _check_names(entry: PolicyEntry, source: Source, schemes: Mapping[str, Scheme]) -> None:
    for path, name in _named_schemes(entry):
        if name not in schemes:
            raise source.error(path, unknown("scheme", name, schemes))


def _named_schemes(entry: PolicyEntry) -> list[tuple[KeyPath, str]]:
    """Where the file names a scheme."""
    named: list[tuple[KeyPath, str]] = [
        (("layers", i, "scheme"), rule.scheme) for i, rule in enumerate(entry.layers or [])
    ]
    return named + ([(("default",), entry.default)] if entry.default is not None else [])
