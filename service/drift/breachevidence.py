"""Evidence of a breach, kept in memory: the worst live row of the newest breach, with inputs, served and fp32 outputs.

The process that measures samples keeps it, for the newest breach of each model version only, in at most
:data:`MAX_ROW_BYTES`. It is dropped with the model or the process and is never written to disk. A caller gets it on
request, if the server permits that.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import bf16kit
from bf16kit.artifact.evidence import Evidence, Header
from bf16kit.drift.metrics import Budget, DriftSummary, SampleDrift
from bf16kit.messages.errors import NotFound
from service.contract import Array
from service.drift.comparison import Drifts
from service.drift.sampler import Sample, copies, size_of
from service.drift.verdict import DriftVerdict
from service.peers.channel import to_json

MAX_ROW_BYTES = 16 << 20  # of one row: its inputs and both outputs
RECENT_ROWS = 256  # as long before a breach a row may be: evidence should be recent
_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "torch")


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
    """Keeps the worst row of the newest breach.

    A breach is a verdict of state ``over`` or cause ``broken``. While it lasts, a worse row replaces the kept one. The
    next breach always replaces it. The worst recent row before a breach is kept as well, because the sample that tips
    the verdict need not be the worst. For one thread only, except :meth:`evidence`.
    """

    def __init__(self, batch_axis: int | None, budget: Budget) -> None:
        self._batch_axis = batch_axis
        self._budget = budget
        self._measured_rows = 0
        self._worst: _Row | None = None  # the worst row before a breach
        self._breach: tuple[_Row, DriftVerdict] | None = None
        self._in_breach = False
        self._oversized_bytes = 0  # size of a breach's row that was too large to keep

    def restart(self) -> None:
        """Start anew, because another precision answers now. The last breach is kept."""
        self._worst, self._in_breach = None, False

    def record(self, expected: Mapping[str, Array], sample: Sample, drifts: Drifts, verdict: DriftVerdict) -> None:
        """Record a measured sample: the reference's outputs, each row's drift, and the verdict after it."""
        over = verdict.state == "over" or verdict.cause == "broken"
        if self._worst is not None and self._measured_rows - self._worst.measured_before > RECENT_ROWS:
            self._worst = None
        row = self._worst_row(expected, sample, drifts, verdict) if drifts else None
        self._measured_rows += sample.rows
        if row is not None and row.nbytes > MAX_ROW_BYTES:
            self._oversized_bytes = row.nbytes if over else self._oversized_bytes
            row = None
        if over:
            self._record_breach(row, verdict)
        elif row is not None and self._is_worse(row, self._worst, verdict):
            self._worst = row.copied()
        self._in_breach = over

    def evidence(self, label: str, files: Mapping[str, str]) -> Evidence:
        """Return the evidence of the newest breach. ``files`` maps the artifact's files to their sha256.

        Raises NotFound, of the model ``label``, if there was no breach. For any thread.
        """
        breach = self._breach
        if breach is None and self._oversized_bytes:
            raise NotFound(
                f"{label}: the rows of its last breach have {self._oversized_bytes} bytes each;"
                f" at most {MAX_ROW_BYTES} are kept"
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
            verdict=to_json(verdict),
            files=dict(files),
            versions=versions(),
        )
        return Evidence(header, dict(row.feeds), dict(row.served), dict(row.reference))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _record_breach(self, row: _Row | None, verdict: DriftVerdict) -> None:
        """Keep the worst of this row and those kept so far: of this breach, or at its begin of the time before it."""
        if not self._in_breach:
            self._breach = None if self._worst is None else (self._worst, verdict)
            self._worst = None
        kept = None if self._breach is None else self._breach[0]
        if row is not None and self._is_worse(row, kept, verdict):
            self._breach = row.copied(), verdict

    def _worst_row(self, expected: Mapping[str, Array], sample: Sample, drifts: Drifts, verdict: DriftVerdict) -> _Row:
        """Return the worst row, as views."""
        by_row: Sequence[Mapping[str, SampleDrift]] = [
            dict(zip(drifts, each, strict=True)) for each in zip(*drifts.values(), strict=False)
        ]
        worst = max(range(len(by_row)), key=lambda row: self._ratio(by_row[row], verdict))
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
            at=verdict.at,
            measured_before=self._measured_rows,
        )

    def _is_worse(self, row: _Row, kept: _Row | None, verdict: DriftVerdict) -> bool:
        return kept is None or self._ratio(row.drift, verdict) > self._ratio(kept.drift, verdict)

    def _ratio(self, drift: Mapping[str, SampleDrift], verdict: DriftVerdict) -> float:
        """Return one row's drift ÷ budget for the bound that the verdict names, or else the worst of all bounds."""
        pairs = [(output, bound) for output in drift for bound in self._budget.bounds]
        if (verdict.output, verdict.metric) in pairs:
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
