"""Proposes a map from shapes and names; it is printed as a file of rules, and used only after confirmation."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from bf16kit.messages.text import printable
from bf16kit.messages.wording import first_few
from converter.read.mapping import rules
from converter.read.mapping.pairing import Pair, pair
from converter.read.mapping.rules import Rule, Rules
from converter.read.mapping.slots import Slot, Slots
from converter.read.mapping.turns import LayoutStep
from converter.source import Array

# Flax's and Haiku's names for torch's weight, bias, running_mean and running_var.
_ROLES = {
    "kernel": "weight", "w": "weight", "embedding": "weight", "embeddings": "weight", "scale": "weight",
    "weight": "weight", "bias": "bias", "b": "bias", "offset": "bias", "mean": "mean", "var": "var",
}  # fmt: skip
_KERNELS = ("kernel", "w")
_WRAPPING = ("value", "raw_value")  # keys that an NNX state has below each variable
# Prefixes of a model's own weights, and names of other collections.
_COLLECTIONS = ("params", "batch_stats", "state", "model", "variables", "target")
_MAIN = ("params", "batch_stats")


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf, the tensor that it fills (None: dropped), the steps to its layout, and the reason."""

    leaf: str
    to: str | None
    steps: tuple[LayoutStep, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """A map, as far as one was found.

    ``ambiguous`` leaves were paired by guessing, ``unmatched`` leaves were not paired, and nothing fills the
    ``missing`` tensors of the model. ``keep`` are tensors that no checkpoint contains.
    """

    entries: tuple[Entry, ...]
    keep: tuple[str, ...]
    ambiguous: tuple[str, ...]
    unmatched: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every leaf and every tensor is paired."""
        return not self.unmatched and not self.missing

    @property
    def certain(self) -> bool:
        """Whether the map is complete without guesses."""
        return self.complete and not self.ambiguous

    def rules(self) -> Rules:
        """Return the map as rules."""
        made = (Rule(re.compile(re.escape(e.leaf)), e.to and e.to.replace("\\", r"\\"), e.steps) for e in self.entries)
        return Rules(tuple(made), tuple(re.compile(re.escape(name)) for name in self.keep))

    def text(self) -> str:
        """Return the map as a file for ``--map``, with its uncertainties at the top."""
        header = ["# Proposed by bf16-convert from shapes and names. Check it before you use it with --map."]
        header += [f"# {line}" for line in self.remarks()]
        entries = [(entry.leaf, entry.to, entry.steps, entry.reason) for entry in self.entries]
        return "\n".join([*header, *rules.lines(entries, self.keep)])

    def remarks(self) -> Iterator[str]:
        """Yield a sentence for each thing that is uncertain or missing."""
        if self.ambiguous:
            yield f"ambiguous, because shapes are equal and names do not decide: {_some(self.ambiguous)}"
        if self.unmatched:
            yield f"no tensor of the model was found for: {_some(self.unmatched)}"
        if self.missing:
            yield f"nothing in the checkpoint was found for the model's: {_some(self.missing)}"


def propose(leaves: Mapping[str, Array], slots: Slots) -> Proposal:
    """Propose a map from ``leaves`` to ``slots``: whole layers first, then the remaining ones individually."""
    collections = {name.partition(".")[0] for name in leaves}
    other_collections = collections.difference(_MAIN) if "params" in collections else set()
    used = {name: array for name, array in leaves.items() if _is_weight(name, array, other_collections)}
    open_slots = {n: slot for n, slot in slots.by_name.items() if slot.floating and n not in slots.twins}
    pairs = list(_by_layers(used, open_slots))
    done = {found.left for found in pairs}, {found.right for found in pairs}
    rest = {name: array for name, array in used.items() if name not in done[0]}
    others = {name: slot for name, slot in open_slots.items() if name not in done[1]}
    pairs += pair(
        list(rest), list(others), lambda leaf, slot: _layout_steps(leaf, rest[leaf].shape, others[slot]) is not None
    )
    placed = {found.left: found for found in pairs}
    filled = {found.right for found in pairs}
    entries = [
        _entry(name, array, placed.get(name), slots)
        for name, array in leaves.items()
        if name in placed or name not in used
    ]
    return Proposal(
        tuple(entries),
        tuple(name for name, slot in slots.by_name.items() if not slot.floating),
        tuple(found.left for found in pairs if found.guessed),
        tuple(name for name in used if name not in placed),
        tuple(name for name in open_slots if name not in filled),
    )


def _entry(name: str, array: Array, found: Pair | None, slots: Slots) -> Entry:
    if found is None:
        return Entry(name, None, (), "not a weight of the model")
    steps = _layout_steps(name, array.shape, slots.by_name[found.right])
    return Entry(name, found.right, steps or (), found.reason)


def _is_weight(name: str, array: Array, other_collections: Set[str]) -> bool:
    """Return whether a leaf is a weight of the model: no counter or random key, and not in ``other_collections``."""
    return (
        array.dtype.kind not in "iub"
        and name.rpartition(".")[2] != "step"
        and name.partition(".")[0] not in other_collections
    )


def _keys(leaf: str) -> list[str]:
    """Return the keys of a leaf without the prefixes of collections and without NNX's last key."""
    keys = leaf.split(".")
    while len(keys) > 1 and keys[0] in _COLLECTIONS:
        keys = keys[1:]
    return keys[:-1] if len(keys) > 1 and keys[-1] in _WRAPPING else keys


def _by_layers(leaves: Mapping[str, Array], slots: Mapping[str, Slot]) -> Iterator[Pair]:
    """Yield pairs of leaves and slots that form a layer, because a kernel and its bias together fit fewer places."""
    left: dict[str, dict[str, str]] = defaultdict(dict)
    for name in leaves:
        keys = _keys(name)
        if len(keys) > 1:
            left[".".join(keys[:-1])][_ROLES.get(keys[-1], keys[-1])] = name
    right: dict[str, dict[str, str]] = defaultdict(dict)
    for name, slot in slots.items():
        owner, _, attribute = name.rpartition(".")
        if owner:
            right[owner][slot.role or attribute] = name

    def fits(layer: str, owner: str) -> bool:
        leaf_roles, slot_roles = left[layer], right[owner]
        return leaf_roles.keys() == slot_roles.keys() and all(
            _layout_steps(leaf_roles[role], leaves[leaf_roles[role]].shape, slots[slot_roles[role]]) is not None
            for role in leaf_roles
        )

    for found in pair(list(left), list(right), fits):
        for role, name in left[found.left].items():
            yield Pair(name, right[found.right][role], found.reason, found.guessed)


def _layout_steps(leaf: str, shape: Sequence[int], slot: Slot) -> tuple[LayoutStep, ...] | None:
    """Return the steps that make a leaf fill ``slot``; None when it does not fit."""
    last = _keys(leaf)[-1]
    role = _ROLES.get(last, "")
    if role and slot.role and role != slot.role:
        return None
    if slot.use == "deconv":
        return None
    if slot.use == "linear" and last not in ("embedding", "embeddings", "weight"):
        return _to_linear(tuple(shape), slot.shape)
    if slot.use == "conv" and last in _KERNELS:
        order = (len(shape) - 1, len(shape) - 2, *range(len(shape) - 2))
        fits = len(shape) == len(slot.shape) > 2 and tuple(shape[axis] for axis in order) == slot.shape
        return (LayoutStep("transpose", order),) if fits else None
    if tuple(shape) == slot.shape:
        return ()
    if slot.use == "matmul" or (slot.use == "plain" and len(slot.shape) == 1 and role in ("", "bias")):
        return _flattened(tuple(shape), slot.shape)
    return None


def _to_linear(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[LayoutStep, ...] | None:
    """Turn [in, out] into [out, in]; either may be several axes, such as heads."""
    if len(shape) < 2 or len(target) != 2:
        return None
    flat = _flattened(shape, (target[1], target[0]))
    return None if flat is None else (*flat, LayoutStep("transpose", (1, 0)))


def _flattened(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[LayoutStep, ...] | None:
    """Merge neighbouring axes: the first ones, the last ones, or all."""
    if shape == target:
        return ()
    if len(shape) <= len(target) or len(target) not in (1, 2) or math.prod(shape) != math.prod(target):
        return None
    fits = len(target) == 1 or any(math.prod(shape[:cut]) == target[0] for cut in range(1, len(shape)))
    return (LayoutStep("reshape", target),) if fits else None


def _some(names: Sequence[str]) -> str:
    return first_few([printable(name, keep="") for name in names])
