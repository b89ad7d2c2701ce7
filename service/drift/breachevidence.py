"""Evidence of a breach, kept in memory: the worst live row of the newest breach, with inputs, served and fp32 outputs.

The process that measures samples keeps it, for the newest breach of each model version only, in at most
:data:`MAX_ROW_BYTES`. It is dropped with the model or the process and is never written to disk. A caller gets it on
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
from service.drift.comparison import DriftObserver, Drifts
from service.drift.sampler import Sample, copies, size_of
from service.drift.verdict import DriftVerdict

MAX_ROW_BYTES = 16 << 20  # of one row: its inputs and both outputs
HALF_LIFE = 64  # rows after which the worst row's drift counts half: evidence should be recent
_MAX_AGE = 4 * HALF_LIFE  # rows after which it counts nothing, however bad it was
_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "torch")


class SampleComparer(Protocol):
    """The interface of :class:`service.drift.comparison.Comparison`."""

    def observe(self, expected: Mapping[str, Array], sample: Sample, observer: DriftObserver) -> Drifts | None: ...
    def verdict(self) -> DriftVerdict: ...
    def restart(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of ``sample``, or the whole sample if its rows cannot be separated."""

    feeds: Mapping[str, Array]
    served: Mapping[str, Array]
    reference: Mapping[str, Array]
    drift: Mapping[str, SampleDrift]  # by output
    sample: Sample  # without arrays
    rows: int
    at: float  # Unix seconds
    measured_before: int  # rows

    @property
    def nbytes(self) -> int:
        return size_of(self.feeds) + size_of(self.served) + size_of(self.reference)

    def copied(self) -> _Row:
        """Return a copy in memory of its own: a view would keep the whole sample alive."""
        return replace(self, feeds=copies(self.feeds), served=copies(self.served), reference=copies(self.reference))


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
        max_bytes: int = MAX_ROW_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._comparison = comparison
        self._batch_axis = batch_axis
        self._budget = budget
        self._max_bytes = max_bytes
        self._clock = clock
        self._measured_rows = 0
        self._worst: _Row | None = None  # the worst row before a breach
        self._breach: tuple[_Row, DriftVerdict] | None = None
        self._in_breach = False
        self._oversized_bytes = 0  # size of a breach's row that was too large to keep

    def verdict(self) -> DriftVerdict:
        """Return the comparison's verdict."""
        return self._comparison.verdict()

    def restart(self) -> None:
        """Start anew, because another precision answers now. The last breach is kept."""
        self._comparison.restart()
        self._worst, self._in_breach = None, False

    def observe(self, expected: Mapping[str, Array], sample: Sample, observer: DriftObserver) -> Drifts | None:
        """See :meth:`service.drift.comparison.Comparison.observe`."""
        drifts = self._comparison.observe(expected, sample, observer)
        if drifts is None:
            return None
        verdict = self._comparison.verdict()
        over = verdict.state == "over" or verdict.cause == "broken"
        row = self._worst_row(expected, sample, drifts, verdict if over else None) if drifts else None
        self._measured_rows += sample.rows
        if row is not None and row.nbytes > self._max_bytes:
            self._oversized_bytes = row.nbytes if over else self._oversized_bytes
            row = None
        if over:
            self._record_breach(row, verdict, new=not self._in_breach)
        elif row is not None and (self._worst is None or self._decayed_ratio(row) > self._decayed_ratio(self._worst)):
            self._worst = row.copied()
        self._in_breach = over
        return drifts

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
        row, verdict = breach
        header = Header(
            model=verdict.model,
            version=verdict.version,
            at=datetime.fromtimestamp(row.at, UTC).isoformat(timespec="seconds"),
            profile=row.sample.profile,
            precision=row.sample.precision,
            rows=row.rows,
            of_rows=row.sample.rows,
            batch_axis=self._batch_axis,
            budget=self._budget.as_dict(),
            drift={output: asdict(each) for output, each in row.drift.items()},
            verdict=verdict.to_json(),
            files=dict(files),
            versions=versions(),
        )
        return Evidence(header, dict(row.feeds), dict(row.served), dict(row.reference))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _record_breach(self, row: _Row | None, verdict: DriftVerdict, *, new: bool) -> None:
        """Keep the worst of this row and those kept so far: of this breach, or at its begin of the time before it."""
        kept = self._worst if new else self._breach and self._breach[0]
        self._worst = None
        if new:
            self._breach = None if kept is None else (kept, verdict)
        if row is not None and (kept is None or self._ratio(row.drift, verdict) > self._ratio(kept.drift, verdict)):
            self._breach = row.copied(), verdict

    def _worst_row(
        self, expected: Mapping[str, Array], sample: Sample, drifts: Drifts, verdict: DriftVerdict | None
    ) -> _Row:
        """Return the worst row, as views."""
        by_row: Sequence[Mapping[str, SampleDrift]] = [
            dict(zip(drifts, each, strict=True)) for each in zip(*drifts.values(), strict=False)
        ]
        worst = max(range(len(by_row)), key=lambda at: self._ratio(by_row[at], verdict))
        axis = self._batch_axis if len(by_row) == sample.rows else None

        def cut(arrays: Mapping[str, Array]) -> dict[str, Array]:
            if axis is None:
                return dict(arrays)
            window = (slice(None),) * axis + (slice(worst, worst + 1),)
            return {name: array[window] for name, array in arrays.items()}

        return _Row(
            feeds=cut(sample.feeds),
            served=cut({name: sample.outputs[name] for name in drifts}),
            reference=cut({name: expected[name] for name in drifts}),
            drift=by_row[worst],
            sample=replace(sample, feeds={}, outputs={}),
            rows=sample.rows if axis is None else 1,
            at=self._clock(),
            measured_before=self._measured_rows,
        )

    def _decayed_ratio(self, row: _Row) -> float:
        """Return a pre-breach row's drift ÷ budget, halved for every :data:`HALF_LIFE` rows measured since."""
        age = self._measured_rows - row.measured_before
        return 0.0 if age > _MAX_AGE else self._ratio(row.drift, None) * 0.5 ** (age / HALF_LIFE)

    def _ratio(self, drift: Mapping[str, SampleDrift], verdict: DriftVerdict | None) -> float:
        """Return one row's drift ÷ budget for the bound that the verdict names, else the worst of all bounds."""
        pairs = [(output, bound) for output in drift for bound in self._budget.bounds]
        if verdict is not None and (verdict.output, verdict.metric) in pairs:
            pairs = [(verdict.output, verdict.metric)]
        found = [(bound, DriftSummary.of([drift[output]]).judged(bound)) for output, bound in pairs]
        return max((self._budget.ratio(bound, value) for bound, value in found if value is not None), default=0.0)


def versions() -> dict[str, str]:
    """Return the versions of bf16kit, Python and the numeric packages, and the machine's architecture."""
    found = {"bf16kit": bf16kit.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
