"""The gauges of the process with the references that must stay visible while it is dead or silent."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import cached_property
from typing import Any

from service.shadow.activity import Key
from service.telemetry.metrics import Metrics

_REFERENCE_UP, _LAST_SAMPLE = "bf16kit_drift_reference_up", "bf16kit_drift_last_sample_timestamp_seconds"
#: A family, as :meth:`service.telemetry.merged.Family.as_json` returns it.
FamilyJson = list[Any]


class LastGauges:
    """The last values of those gauges."""

    def __init__(self) -> None:
        self._kept: Sequence[FamilyJson] = ()

    def keep(self, families: Iterable[FamilyJson]) -> None:
        """Keep those gauges out of all families that the process has reported."""
        self._kept = [family for family in families if family[0] in (_REFERENCE_UP, _LAST_SAMPLE)]

    def with_missing_down(self, families: Iterable[FamilyJson], known: Iterable[Key]) -> list[FamilyJson]:
        """Return ``families``, with the reference marked down for each model of ``known`` that it does not mention."""
        return [_with_missing_down(family, known) if family[0] == _REFERENCE_UP else family for family in families]

    def after_death(self, known: Sequence[Key]) -> list[FamilyJson]:
        """Return the gauges for the models of ``known`` while the process is dead or has not reported anything yet."""
        kept = [_after_death(_only_known(family, known)) for family in self._kept]
        if not any(family[0] == _REFERENCE_UP for family in kept):
            kept.append(self._no_references)
        return self.with_missing_down(kept, known)

    @cached_property
    def _no_references(self) -> FamilyJson:
        """The family of references, as a process without any would report it."""
        (family,) = Metrics().snapshot(_REFERENCE_UP)
        return family.as_json()


def _with_missing_down(family: Sequence[Any], known: Iterable[Key]) -> FamilyJson:
    *head, series = family
    reported = {_key(labels) for _, labels, _, _ in series}
    missing = [key for key in known if key not in reported]
    return [*head, [*series, *([_REFERENCE_UP, {"model": name, "version": str(n)}, 0.0, None] for name, n in missing)]]


def _only_known(family: Sequence[Any], known: Container[Key]) -> FamilyJson:
    *head, series = family
    return [*head, [each for each in series if _key(each[1]) in known]]


def _after_death(family: Sequence[Any]) -> FamilyJson:
    *head, series = family
    down = family[0] == _REFERENCE_UP
    return [*head, [[name, labels, 0.0 if down else value, exemplar] for name, labels, value, exemplar in series]]


def _key(labels: dict[str, str]) -> Key:
    return labels["model"], int(labels["version"])
