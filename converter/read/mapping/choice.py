"""Chooses the map: the given one, or a proposed one that must be confirmed before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bf16kit.messages.errors import UsageError
from converter.options import Options
from converter.read.mapping import rules
from converter.read.mapping.proposal import Proposal, propose
from converter.read.mapping.rules import MappedTensors
from converter.read.mapping.slots import Slots
from converter.source import Array

_NEXT = (
    "check the rules on standard output, write them to a file and pass it as --map; or accept them with"
    " --accept-map; or confirm them with --samples that hold the inputs and the fp32 outputs of the source's own"
    " framework"
)


class UnconfirmedMap(UsageError):
    """A map was proposed but not confirmed; ``rules`` is the text of a file for ``--map``."""

    def __init__(self, message: str, rules: str) -> None:
        super().__init__(message)
        self.rules = rules


@dataclass(frozen=True, slots=True)
class ChosenMap:
    """The map, notes on it, and the rules that samples must still confirm, if any."""

    mapped: MappedTensors
    notes: tuple[str, ...] = ()
    proposed_rules: str | None = None


def choose(options: Options, leaves: Mapping[str, Array], slots: Slots) -> ChosenMap:
    """Return the map from ``leaves`` to ``slots``.

    Raises :class:`UnconfirmedMap` if there is only a proposal, and it is incomplete or neither ``--accept-map`` nor
    samples can confirm it. Raises :class:`SourceError` when a given map does not fit.
    """
    if options.map is not None:
        return ChosenMap(rules.apply(rules.read(options.map), leaves, slots))
    found = propose(leaves, slots)
    if not found.complete or (options.accept_map and not found.certain):
        raise _unconfirmed(options, found, "--accept-map cannot accept this map: " if options.accept_map else "")
    if options.accept_map:
        note = f"--accept-map: {len(found.entries)} leaves were placed by the proposed map, which was not confirmed"
        return ChosenMap(rules.apply(found.rules(), leaves, slots), (note,))
    if options.samples is None:
        raise _unconfirmed(options, found, "")
    return ChosenMap(rules.apply(found.rules(), leaves, slots), proposed_rules=found.text())


def _unconfirmed(options: Options, found: Proposal, prefix: str) -> UnconfirmedMap:
    remarks = "".join(f"\n  {remark}" for remark in found.remarks())
    instruction = "complete the rules on standard output and pass them as --map" if not found.complete else _NEXT
    if options.accept_map:
        instruction = "complete or correct the rules on standard output and pass them as --map"
    return UnconfirmedMap(
        f"{options.source}: {prefix}a map of its {len(found.entries)} leaves to the model is proposed;"
        f" {instruction}{remarks}",
        found.text(),
    )


def map_refuted(source: str, reason: str, rules: str) -> UnconfirmedMap:
    """Return the error for a proposal that samples do not confirm, and why."""
    return UnconfirmedMap(f"{source}: the proposed map is not confirmed: {reason}; {_NEXT}", rules)
