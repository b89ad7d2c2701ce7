"""The gauges of the process with the references that must stay visible while it is dead or silent."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from typing import Any

from service.shadow.board import Key
from service.telemetry.metrics import Metrics

_DOWN, _LAST = "bf16kit_drift_reference_up", "bf16kit_drift_last_sample_timestamp_seconds"
#: A family, as :meth:`service.telemetry.whole.Family.as_json` returns it.
Told = list[Any]


class Gauges:
    """The last values of those gauges."""

    def __init__(self) -> None:
        self._kept: Sequence[Told] = ()

    def keep(self, told: Iterable[Told]) -> None:
        """Keep those gauges out of all families that the process has reported."""
        self._kept = [family for family in told if family[0] in (_DOWN, _LAST)]

    def whole(self, told: Iterable[Told], known: Iterable[Key]) -> list[Told]:
        """Return ``told``, with the reference marked down for each model of ``known`` that it does not mention."""
        return [_with_down(family, known) if family[0] == _DOWN else family for family in told]

    def left(self, known: Sequence[Key]) -> list[Told]:
        """Return the gauges for the models of ``known`` while the process is dead or has not reported anything yet."""
        kept = [_after_death(_of(family, known)) for family in self._kept]
        if not any(family[0] == _DOWN for family in kept):
            kept.append(self._nothing)
        return self.whole(kept, known)

    @cached_property
    def _nothing(self) -> Told:
        """The family of references, as a process without any would report it."""
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
