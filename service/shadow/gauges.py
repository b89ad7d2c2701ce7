"""The gauges of the process with the references that are to be seen when it is dead too, or does not tell them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from typing import Any

from service.shadow.board import Key
from service.telemetry.metrics import Metrics

_DOWN, _LAST = "bf16kit_drift_reference_up", "bf16kit_drift_last_sample_timestamp_seconds"
#: As :meth:`service.telemetry.whole.Family.as_json` has it.
Told = list[Any]


class Gauges:
    """What was told last of those gauges."""

    def __init__(self) -> None:
        self._kept: Sequence[Told] = ()

    def keep(self, told: Iterable[Told]) -> None:
        """What the process has told of everything it counts."""
        self._kept = [family for family in told if family[0] in (_DOWN, _LAST)]

    def whole(self, told: Iterable[Told], known: Iterable[Key]) -> list[Told]:
        """The same, and that the reference is down of each model of ``known`` that it does not speak of."""
        return [_with_down(family, known) if family[0] == _DOWN else family for family in told]

    def left(self, known: Sequence[Key]) -> list[Told]:
        """What is to be seen while the process is dead, or before it has said anything, of the models of ``known``."""
        kept = [_after_death(_of(family, known)) for family in self._kept]
        if not any(family[0] == _DOWN for family in kept):
            kept.append(self._nothing)
        return self.whole(kept, known)

    @cached_property
    def _nothing(self) -> Told:
        """The family of references, as the process would tell it that has none."""
        (family,) = Metrics().snapshot(_DOWN)
        return family.as_json()


def _with_down(family: Sequence[Any], known: Iterable[Key]) -> Told:
    *head, series = family
    told = {_key(labels) for _, labels, _, _ in series}
    missing = [key for key in known if key not in told]
    return [*head, [*series, *([_DOWN, {"model": name, "version": str(n)}, 0.0, None] for name, n in missing)]]


def _of(family: Sequence[Any], known: Container[Key]) -> Told:
    *head, series = family
    return [*head, [each for each in series if _key(each[1]) in known]]


def _after_death(family: Sequence[Any]) -> Told:
    *head, series = family
    down = family[0] == _DOWN
    return [*head, [[name, labels, 0.0 if down else value, exemplar] for name, labels, value, exemplar in series]]


def _key(labels: dict[str, str]) -> Key:
    return labels["model"], int(labels["version"])
