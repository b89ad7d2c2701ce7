"""Evidence of a breach, kept in memory: the worst live row of the newest breach, with inputs, served and fp32 outputs.

The process that measures samples keeps it, for the newest breach of each model version only, in at most
:data:`MAX_BYTES`. It is dropped with the model or the process and is never written to disk. A caller gets it on
request, if the server permits that.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import bf16kit
from bf16kit.artifact.evidence import Evidence, Header
from bf16kit.drift.metrics import Budget, DriftSummary, SampleDrift
from bf16kit.messages.errors import NotFound
from service.contract import Array
from service.drift.observer import DriftObserver
from service.drift.sampling import Sample, copies, size_of
from service.drift.verdict import DriftVerdict

MAX_BYTES = 16 << 20  # of one row: its inputs and both outputs
HALF_LIFE = 64  # rows after which the worst row's drift counts half: evidence should be recent
_MAX_AGE = 4 * HALF_LIFE  # rows after which it counts nothing, however bad it was
_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "torch")


class SampleComparer(Protocol):
    """The interface of :class:`service.drift.comparison.Comparison`."""

    def observe(self, expected: Mapping[str, Array], sample: Sample, observer: DriftObserver) -> bool: ...
    def verdict(self) -> DriftVerdict: ...
    def restart(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a sample, or the whole sample if its rows cannot be separated."""

    feeds: Mapping[str, Array]
    served: Mapping[str, Array]
    reference: Mapping[str, Array]
    drift: Mapping[str, SampleDrift]  # by output
    profile: str
    precision: str
    rows: int
    of_rows: int
    at: float  # Unix seconds
    measured_before: int  # rows

    @property
    def nbytes(self) -> int:
        return size_of(self.feeds) + size_of(self.served) + size_of(self.reference)

    def copied(self) -> _Row:
        """Return a copy in memory of its own: a view would keep the whole sample alive."""
        return replace(self, feeds=copies(self.feeds), served=copies(self.served), reference=copies(self.reference))


@dataclass(frozen=True, slots=True)
class _Breach:
    row: _Row
    verdict: DriftVerdict


class EvidenceRecorder:
    """A :class:`SampleComparer` that wraps another one and keeps the worst row of the newest breach.

    A breach is a verdict of state ``over`` or cause ``broken``. While it lasts, a worse row replaces the kept one. The
    next breach always replaces it. The worst recent row before a breach is kept as well, because the sample that tips
    the verdict need not be the worst. For one thread only, except :meth:`evidence`.
    """

    def __init__(
        self,
        comparison: SampleComparer,
        batch_axis: int | None,
        budget: Budget,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._comparison = comparison
        self._batch_axis = batch_axis
        self._budget = budget
        self._max_bytes = max_bytes
        self._clock = clock
        self._measured_rows = 0
        self._worst: _Row | None = None  # the worst row before a breach
        self._breach: _Breach | None = None
        self._in_breach = False
        self._oversized_bytes = 0  # size of a breach's row that was too large to keep

    def verdict(self) -> DriftVerdict:
        """Return the comparison's verdict."""
        return self._comparison.verdict()

    def restart(self) -> None:
        """Start anew, because another precision answers now. The last breach is kept."""
        self._comparison.restart()
        self._worst, self._in_breach = None, False

    def observe(self, expected: Mapping[str, Array], sample: Sample, observer: DriftObserver) -> bool:
        """See :meth:`service.drift.comparison.Comparison.observe`."""
        row_drifts = _RowDrifts(observer)
        if not self._comparison.observe(expected, sample, row_drifts):
            return False
        verdict = self._comparison.verdict()
        over = verdict.state == "over" or verdict.cause == "broken"
        row = self._worst_row(expected, sample, row_drifts.rows, verdict if over else None)
        self._measured_rows += sample.rows
        if over:
            self._record_breach(row, verdict, new=not self._in_breach)
        elif row is not None and (self._worst is None or self._decayed_ratio(row) > self._decayed_ratio(self._worst)):
            self._worst = row.copied()
        self._in_breach = over
        return True

    def evidence(self, files: Mapping[str, str]) -> Evidence:
        """Return the evidence of the newest breach. ``files`` maps the artifact's files to their sha256.

        Raises NotFound if there was no breach. For any thread.
        """
        breach, verdict = self._breach, self._comparison.verdict()
        label = f"model {verdict.model!r} version {verdict.version}"
        if breach is None and self._oversized_bytes:
            raise NotFound(
                f"{label}: the rows of its last breach have {self._oversized_bytes} bytes each;"
                f" at most {self._max_bytes} are kept"
            )
        if breach is None:
            raise NotFound(f"{label} has not been over its budget since its fp32 reference was loaded")
        return Evidence(
            self._header(breach, files), dict(breach.row.feeds), dict(breach.row.served), dict(breach.row.reference)
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _record_breach(self, row: _Row | None, verdict: DriftVerdict, *, new: bool) -> None:
        candidates = [each for each in (row, self._worst if new else None) if each is not None]
        worst = max(candidates, key=lambda each: self._ratio(each.drift, verdict), default=None)
        self._worst = None
        if worst is None:
            if new:
                self._breach = None  # drop the previous breach's row: this breach's row is reported as too large
            return
        kept = None if new or self._breach is None else self._breach.row
        if kept is None or self._ratio(worst.drift, verdict) > self._ratio(kept.drift, verdict):
            self._breach = _Breach(worst.copied(), verdict)

    def _worst_row(
        self,
        expected: Mapping[str, Array],
        sample: Sample,
        drift: Mapping[str, Sequence[SampleDrift]],
        verdict: DriftVerdict | None,
    ) -> _Row | None:
        """Return the worst row, as views; None if it is too large or no row was compared."""
        count = min((len(rows) for rows in drift.values()), default=0)
        if not count:
            return None
        by_row = [{output: rows[at] for output, rows in drift.items()} for at in range(count)]
        worst = max(range(count), key=lambda at: self._ratio(by_row[at], verdict))
        separable = self._batch_axis is not None and count == sample.rows

        def cut(arrays: Mapping[str, Array]) -> dict[str, Array]:
            if not separable or self._batch_axis is None:
                return dict(arrays)
            window = (slice(None),) * self._batch_axis + (slice(worst, worst + 1),)
            return {name: array[window] for name, array in arrays.items()}

        row = _Row(
            feeds=cut(sample.feeds),
            served=cut({name: sample.outputs[name] for name in drift}),
            reference=cut({name: expected[name] for name in drift}),
            drift=by_row[worst],
            profile=sample.profile,
            precision=sample.precision,
            rows=1 if separable else sample.rows,
            of_rows=sample.rows,
            at=self._clock(),
            measured_before=self._measured_rows,
        )
        if row.nbytes > self._max_bytes:
            if verdict is not None:
                self._oversized_bytes = row.nbytes
            return None
        return row

    def _decayed_ratio(self, row: _Row) -> float:
        """Return a pre-breach row's drift ÷ budget, halved for every :data:`HALF_LIFE` rows measured since."""
        age = self._measured_rows - row.measured_before
        return 0.0 if age > _MAX_AGE else self._ratio(row.drift, None) * 0.5 ** (age / HALF_LIFE)

    def _ratio(self, drift: Mapping[str, SampleDrift], verdict: DriftVerdict | None) -> float:
        """Return one row's drift ÷ budget for the bound that the verdict names, else the worst of all bounds."""
        named = verdict is not None and verdict.output in drift and verdict.metric in self._budget.bounds
        pairs = (
            [(verdict.output, verdict.metric)]
            if named and verdict is not None
            else [(output, bound) for output in drift for bound in self._budget.bounds]
        )
        found = [(bound, DriftSummary.of([drift[output]]).judged(bound)) for output, bound in pairs]
        return max((self._budget.ratio(bound, value) for bound, value in found if value is not None), default=0.0)

    def _header(self, breach: _Breach, files: Mapping[str, str]) -> Header:
        row, verdict = breach.row, breach.verdict
        return Header(
            model=verdict.model,
            version=verdict.version,
            at=datetime.fromtimestamp(row.at, UTC).isoformat(timespec="seconds"),
            profile=row.profile,
            precision=row.precision,
            rows=row.rows,
            of_rows=row.of_rows,
            batch_axis=self._batch_axis,
            budget=self._budget.as_dict(),
            drift={output: asdict(each) for output, each in row.drift.items()},
            verdict=verdict.to_json(),
            files=dict(files),
            versions=versions(),
        )


class _RowDrifts:
    """Forwards every call to an observer, and keeps the drift of each row of one sample, unless it is judged apart."""

    def __init__(self, observer: DriftObserver) -> None:
        self.rows: dict[str, list[SampleDrift]] = {}
        self._apart = False  # an input is out of range: no evidence of the model
        self._drift = observer.drift
        self._out_of_range = observer.out_of_range
        self.judged_rows = observer.judged_rows
        self.budget_ratio = observer.budget_ratio
        self.worst_slice = observer.worst_slice
        self.recent = observer.recent
        self.changed = observer.changed
        self.reference_nonfinite = observer.reference_nonfinite
        self.judged = observer.judged

    def drift(self, output: str, sample: SampleDrift, weight: float, *, scalar: bool = False) -> None:
        if not self._apart:
            self.rows.setdefault(output, []).append(sample)
        self._drift(output, sample, weight, scalar=scalar)

    def out_of_range(self, name: str, rows: int) -> None:
        self._apart = self._apart or rows > 0
        self._out_of_range(name, rows)


def versions() -> dict[str, str]:
    """Return the versions of bf16kit, Python and the numeric packages, and the machine's architecture."""
    found = {"bf16kit": bf16kit.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
