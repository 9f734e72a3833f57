"""The policy's answer for each linear of a captured graph, by the module that owns its weight."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule, Node

from . import dynamo, predicting, stamping, watching
from .blocks import clean_name, find_blocks, is_linear, linears, unwrap
from .passes.chains import Chain, find_chains
from .passes.machines import Machine
from .passes.names import source_name
from .passes.nodes import is_tensor, op
from .passes.sites import Site, find_sites
from .passes.weights import is_constant, is_parameter
from .policy import Policy
from .roots import Place, Places
from .stamp import Decision, Stamp

_resolved: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.WeakKeyDictionary]] = (
    weakref.WeakKeyDictionary()
)
_members: weakref.WeakKeyDictionary[GraphModule, set[str]] = weakref.WeakKeyDictionary()


@dataclass
class Asked:
    """One question of the passes, and what was answered.

    ``cut``: the layer is in a chain, of which DDP put a part into another graph.
    """

    site: Site
    in_chain: bool
    cut: bool
    place: Place | None
    stamp: Stamp
    decision: Decision


def reads_data(node: Node) -> bool:
    """True for an operation of which an input is neither a parameter nor a buffer."""
    return any(
        is_tensor(n) and not is_parameter(n) and not is_constant(n) for n in node.all_input_nodes
    )


def resolve(
    policy: Policy, model: nn.Module, below_break: bool
) -> tuple[Mapping[nn.Module, Stamp], list[str]]:
    """The stamps of the linears of ``model``, and warnings the first time that they are asked for.

    ``below_break``: one graph serves every block of a class there, so that the model is stamped.
    """
    known, key = _resolved.setdefault(model, {}), stamping.digest(policy)
    fresh = key not in known
    resolution = policy.resolve(model) if fresh or below_break else None
    if resolution is not None and fresh:
        known[key] = weakref.WeakKeyDictionary(resolution.modules)
    if resolution is not None and below_break:
        stamping.stamp_modules(model, policy, resolution, automatic=True)
    if resolution is None or not fresh:
        return known[key], []
    applied = any(stamping.INFO in module.__dict__ for module in resolution.modules)
    late = [stamping.phases_message(policy)] if policy.phases and not applied else []
    return known[key], [*resolution.warnings, *late]


_captured: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def was_captured(model: nn.Module) -> bool:
    """Whether the backend got a graph of ``model``, the outermost module of a compiled call."""
    return model in _captured


def chain_members(gm: GraphModule) -> set[str]:
    """The weights of the layers that are in chains, by their sources' names."""
    if gm not in _members:
        sites = [site for chain in find_chains(find_sites(gm)) for site in chain.sites]
        _members[gm] = {source_name(s.source) for s in sites if s.source is not None}
    return _members[gm]


def watch_layers(model: nn.Module, stamps: Mapping[nn.Module, Stamp]) -> None:
    """Watch the linears of ``model`` that carry no stamp; the others are watched since they do.

    Who copies a model after `model.compile()` expects a compiled one, which it is not.
    """
    in_place = any(m._compiled_call_impl is not None for m in model.modules())
    for name, module in model.named_modules():
        if module in stamps and stamping.stamp_of(module) is None:
            watching.watch(module, stamps[module], clean_name(name), copies=in_place)


class Choice:
    """``choice(site, role) -> Decision`` for `passes.rewrite`; guards every stamp that it reads.

    ``explaining``: nothing is watched, and a graph is captured for every module it could serve.
    ``machine``: the one that times are predicted for, default the present GPU.
    """

    def __init__(
        self, gm: GraphModule, policy: Policy, explicit: bool, explaining: bool = False,
        machine: Machine | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.explicit, self.explaining = policy, explicit, explaining
        self.machine, self._gm = machine, gm
        self._chains: list[Chain] | None = None
        self.places = Places(gm)
        whole = dynamo.before_split(gm)
        self._whole_chains = chain_members(whole) if whole is not None else set()
        self.asked: list[Asked] = []
        self.label = policy.name
        self.warnings: list[str] = []

    def __call__(self, site: Site, role: str | None) -> Decision:
        """The decision for ``site``; ``role`` is "mlp" where it is part of a chain.

        A chain that DDP cut is one still: its layers keep their precision, each by itself.
        """
        place, stamp = self._stamp_of(site)
        cut = role is None and self._cut(site)
        in_chain = cut or role is not None
        if place is not None:
            dynamo.guard_stamp(place.owner, place.attribute)
            if self.explaining:
                dynamo.guard_identity(place.owner)
        decision = stamp.decision(in_chain)
        if decision.auto is not None:
            decision = self._by_size(site, decision)
        self.asked.append(Asked(site, in_chain, cut, place, stamp, decision))
        return decision

    def _stamp_of(self, site: Site) -> tuple[Place | None, Stamp]:
        place = self.places.of(site)
        return place, self._stamp(place) if place else self.policy.stamp_for(site.name)

    def _by_size(self, site: Site, decision: Decision) -> Decision:
        """What `auto` comes to: of a chain that is `auto` throughout as one, else of the layer."""
        machine = predicting.machine_for(decision, predicting.device_of(site), self.machine)
        if self._chains is None:
            self._chains = find_chains(find_sites(self._gm))
        chain = predicting.chain_of(self._chains, site)
        if chain is not None:
            all_of = [self._stamp_of(s)[1].decision(True) for s in chain.sites]
            if all(d.auto == decision.auto for d in all_of):
                schemes = [d.scheme for d in all_of]
                times = predicting.chain_times(chain.sites, schemes, machine)
                return predicting.resolved(decision, predicting.judge(times, machine))
        times = [predicting.layer_times(site, decision.scheme, machine)]
        return predicting.resolved(decision, predicting.judge(times, machine))

    def _cut(self, site: Site) -> bool:
        return site.source is not None and source_name(site.source) in self._whole_chains

    def _stamp(self, place: Place) -> Stamp:
        module = place.owner.module
        stamped = stamping.stamp_of(module, place.attribute)
        if stamped is not None and not stamping.outdated(module, self.policy):
            if self.explicit:
                stamping.check_agreement(module, self.policy)
            self.label = stamping.label_of(module) or self.label
            return stamped
        stamps = self._resolve(place.model, place.below_break)
        stamp = stamps.get(module) if place.attribute == stamping.STAMP else None
        return stamp or self._by_name(place)

    def _by_name(self, place: Place) -> Stamp:
        blocks = find_blocks(place.model)
        return self.policy.stamp_for(place.name, blocks.block_of(place.name) if blocks else None)

    def _resolve(self, model: nn.Module, below_break: bool) -> Mapping[nn.Module, Stamp]:
        stamps, warnings = resolve(self.policy, model, below_break)
        self.warnings += warnings
        return stamps

    def finish(self) -> None:
        """Watch the layers that the policy names: they must not run outside of compiled graphs."""
        for model in {asked.place.model for asked in self.asked if asked.place}:
            _captured.add(model)
            watch_layers(model, _resolved.get(model, {}).get(stamping.digest(self.policy), {}))
        for asked in self.asked:
            if asked.place is not None and asked.place.attribute == stamping.STAMP:
                watching.seen_in_graph(asked.place.owner.module, asked.in_chain)

    def other_readers(self, gm: GraphModule) -> list[tuple[Place, Stamp, str]]:
        """Linears whose weight an operation reads that is no linear layer, and its name.

        Some operations hold whole layers (``_transformer_encoder_layer_fwd``). An operation on
        weights alone, a norm or a decay, is none.
        """
        asked = {a.place.owner.module for a in self.asked if a.place}
        found = []
        for node in gm.graph.nodes:
            place = self.places.of_input(node)
            if place is None or place.owner.parameter != "weight":
                continue
            reader = next((n for n in node.users if reads_data(n)), None)
            module = place.owner.module
            if reader is not None and is_linear(module) and module not in asked:
                found.append((place, self._stamp(place), op(reader) or reader.name))
        return found

    def label_of(self, model: nn.Module | None) -> str:
        """The name of the policy that a model's report is under: the user's stamps come first."""
        layers = linears(model) if model is not None else ()
        labels = (stamping.label_of(m) for m in layers if not stamping.outdated(m, self.policy))
        return next((label for label in labels if label), self.policy.name)

    @property
    def models(self) -> list[nn.Module]:
        """The models of the compiled call, by the captured graph's inputs."""
        return list(dict.fromkeys(unwrap(root) for root in self.places.roots))

    @property
    def complete(self) -> bool:
        """True where this graph is the last of the outermost modules' own frames."""
        below = any(asked.place and asked.place.below_break for asked in self.asked)
        return bool(self.places.roots) and not self.places.breaks and not below

    @property
    def own_warnings(self) -> list[str]:
        """The warnings but the recipe's about missing blocks."""
        advice = [line for model in self.models for line in self.policy.check_blocks(model)]
        return [line for line in self.warnings if line not in advice]

    @property
    def kept(self) -> list[Asked]:
        """The layers that `auto` left in their original precision."""
        return [
            a for a in self.asked
            if a.decision.scheme.original and a.stamp.decision(a.in_chain).auto is not None
        ]  # fmt: skip

    @property
    def alone(self) -> bool:
        """True where the graph is the forward of one linear, called from an eager frame."""
        return any(asked.place is not None and asked.place.alone for asked in self.asked)
