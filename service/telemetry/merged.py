"""Combines several processes' metrics into one server's: counters and histograms are summed, gauges use their mode.

A process reports what it counts when it is asked, and leaves out what has not changed; its newest report counts. When a
process dies, its gauges disappear but its counters stay: otherwise the server's counters would fall at a restart.
Independent of prometheus_client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, Self

Mode = Literal["sum", "min", "max"]
_MERGE: Mapping[Mode, Callable[[float, float], float]] = {"sum": lambda a, b: a + b, "min": min, "max": max}


class Exemplar(NamedTuple):
    """A single observation that a histogram's bucket points to."""

    labels: dict[str, str]
    value: float
    timestamp: float | None


class Series(NamedTuple):
    """One value. ``name`` is the sample's name, such as that of a histogram's bucket."""

    name: str
    labels: dict[str, str]
    value: float
    exemplar: Exemplar | None = None

    @property
    def key(self) -> tuple[str, ...]:
        return (self.name, *(part for label in sorted(self.labels.items()) for part in label))

    @property
    def model(self) -> tuple[str, str] | None:
        """The model and version that it belongs to, if any."""
        labels = self.labels
        return (labels["model"], labels["version"]) if "model" in labels and "version" in labels else None


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one metric. ``kind`` is Prometheus' type; ``mode`` is how several processes' gauges combine."""

    name: str
    kind: str
    text: str
    mode: Mode
    series: Sequence[Series] = field(default_factory=tuple)

    @property
    def cumulative(self) -> bool:
        """Whether it only grows while its process lives."""
        return self.kind in ("counter", "histogram")

    def as_json(self) -> list[Any]:
        return [self.name, self.kind, self.text, self.mode, self.series]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Self:
        series = []
        for name, labels, value, exemplar in fields[4]:
            series.append(Series(name, labels, value, None if exemplar is None else Exemplar(*exemplar)))
        return cls(fields[0], fields[1], fields[2], fields[3], series)


class MergedMetrics:
    """The metrics of several processes as one server's.

    ``served`` returns the served models and versions. Counts of dead processes for other models are dropped.
    """

    def __init__(self, served: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._served = served
        self._lock = threading.Lock()
        self._latest: dict[str, Mapping[str, Family]] = {}  # by process, then by name
        self._kept: dict[tuple[str, ...], tuple[Family, Series]] = {}  # counts of series and processes that are gone

    def update(self, process: str, families: Iterable[Family], *, complete: bool = True) -> None:
        """Replace ``process``' report by its newest one. The previous value of a counter that restarted is kept.

        Families that are missing in a report that is not ``complete`` have not changed.
        """
        newest = {family.name: family for family in families}
        with self._lock:
            before = self._latest.get(process, {})
            if not complete:
                newest = {**before, **newest}
            for name, family in before.items():
                if family.cumulative:
                    now = newest.get(name)
                    self._keep(family, {} if now is None else {each.key: each.value for each in now.series})
            self._latest[process] = newest

    def process_died(self, process: str) -> None:
        """Note that ``process`` died. Its counts are kept."""
        with self._lock:
            for family in self._latest.pop(process, {}).values():
                if family.cumulative:
                    self._keep(family, {})

    def forget(self, model: str, versions: Collection[int]) -> None:
        """Drop kept counts of versions that were reloaded: they belong to earlier generations."""
        reloaded = {(model, str(version)) for version in versions}
        with self._lock:
            self._drop(lambda key: key in reloaded)

    def families(self) -> list[Family]:
        """Return the whole server's families, in the order of their first report."""
        with self._lock:
            live = {each.model for families in self._latest.values() for f in families.values() for each in f.series}
            needed = live | {None} | set(self._served())
            self._drop(lambda key: key not in needed)
            kept = [replace(family, series=[series]) for family, series in self._kept.values()]
            return merge(kept, *(list(families.values()) for families in self._latest.values()))

    def samples(self, names: Iterable[str]) -> Iterator[Series]:
        """Yield the series with these sample names."""
        wanted = set(names)
        return (series for family in self.families() for series in family.series if series.name in wanted)

    def _keep(self, family: Family, now: Mapping[tuple[str, ...], float]) -> None:
        """Keep the values of ``family``'s series that fell or are missing in ``now``. The caller holds the lock."""
        for series in family.series:
            key = series.key
            if series.value and now.get(key, 0.0) < series.value:
                _, before = self._kept.get(key, (family, series._replace(value=0.0)))
                self._kept[key] = family, series._replace(value=before.value + series.value)

    def _drop(self, condition: Callable[[tuple[str, str] | None], bool]) -> None:
        self._kept = {key: kept for key, kept in self._kept.items() if not condition(kept[1].model)}


def merge(*many: Iterable[Family]) -> list[Family]:
    """Combine several processes' families into one list, in the order given."""
    merged: dict[str, tuple[Family, dict[tuple[str, ...], Series]]] = {}
    for family in chain.from_iterable(many):
        first, series = merged.setdefault(family.name, (family, {}))
        combine = _MERGE["sum" if first.cumulative else first.mode]
        for each in family.series:
            before = series.get(each.key)
            series[each.key] = each if before is None else _combined(before, each, combine)
    return [replace(family, series=list(series.values())) for family, series in merged.values()]


def _combined(a: Series, b: Series, combine: Callable[[float, float], float]) -> Series:
    """Return one series of two: it has the newest exemplar."""
    exemplars = [each for each in (a.exemplar, b.exemplar) if each is not None]
    newest = max(exemplars, key=lambda each: each.timestamp or 0.0, default=None)
    return Series(b.name, b.labels, combine(a.value, b.value), newest)
