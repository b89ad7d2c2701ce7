"""Evidence of a breach, kept in memory: the worst live row of the newest breach, with inputs, served and fp32 outputs.

The process that measures samples keeps it, for the newest breach of each model version only, in at most
:data:`MAX_ROW_BYTES`. It is dropped with the model or the process and is never written to disk. A caller gets it on
request, if the server permits that.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import bf16kit
from bf16kit.artifact.evidence import Evidence, Header
from bf16kit.drift.metrics import Budget, DriftSummary, SampleDrift
from bf16kit.messages.errors import NotFound
from bf16kit.service.contract import Array
from bf16kit.service.drift.comparison import Drifts
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.sampler import Sample, copies, size_of
from bf16kit.service.peers.channel import to_json

MAX_ROW_BYTES = 16 << 20  # of one row: its inputs and both outputs
_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "torch")
_RowDrift = Mapping[str, SampleDrift]  # of one row, by output


class EvidenceRecorder:
    """Keeps the worst row of the newest breach.

    A breach is a verdict of state ``over`` or cause ``broken``. While it lasts, a worse row replaces the kept one. The
    next breach always replaces it. For one thread only, except :meth:`evidence`.
    """

    def __init__(self, batch_axis: int | None, budget: Budget, files: Mapping[str, str]) -> None:
        """``files`` maps the artifact's files to their sha256."""
        self._batch_axis = batch_axis
        self._budget = budget
        self._files = dict(files)
        self._versions = versions()  # looked up before it is asked for: it takes some 60 ms
        self._in_breach = False
        self._kept: Evidence | None = None
        self._worst: _RowDrift = {}  # of the kept row
        self._oversized_bytes = 0  # size of a breach's row that was too large to keep

    def restart(self) -> None:
        """Start anew, because another precision answers now. The last breach is kept."""
        self._in_breach = False

    def record(self, expected: Mapping[str, Array], sample: Sample, drifts: Drifts, verdict: DriftVerdict) -> None:
        """Record a measured sample: the reference's outputs, each row's drift, and the verdict after it."""
        over = verdict.state == "over" or verdict.cause == "broken"
        if over and not self._in_breach:
            self._kept = None
        self._in_breach = over
        if not over or not drifts:
            return
        rows = [dict(zip(drifts, each, strict=True)) for each in zip(*drifts.values(), strict=False)]
        at = max(range(len(rows)), key=lambda at: self._ratio(rows[at], verdict))
        if self._kept is None or self._ratio(rows[at], verdict) > self._ratio(self._worst, verdict):
            kept = [at] if len(rows) == sample.rows and self._batch_axis is not None else None
            parts = (
                sample.feeds,
                {name: sample.outputs[name] for name in drifts},
                {name: expected[name] for name in drifts},
            )
            nbytes = sum(size_of(arrays, kept, self._batch_axis) for arrays in parts)
            if nbytes > MAX_ROW_BYTES:
                self._oversized_bytes = nbytes
            else:
                self._kept, self._worst = self._evidence(parts, kept, sample, rows[at], verdict), rows[at]

    def evidence(self, label: str) -> Evidence:
        """Return the evidence of the newest breach. For any thread.

        Raises NotFound, of the model ``label``, if there was no breach.
        """
        kept = self._kept
        if kept is None and self._oversized_bytes:
            raise NotFound(
                f"{label}: the rows of its last breach have {self._oversized_bytes} bytes each;"
                f" at most {MAX_ROW_BYTES} are kept"
            )
        if kept is None:
            raise NotFound(f"{label} has not been over its budget since its fp32 reference was loaded")
        return kept

    def _evidence(
        self,
        parts: tuple[Mapping[str, Array], ...],
        kept: list[int] | None,
        sample: Sample,
        drift: _RowDrift,
        verdict: DriftVerdict,
    ) -> Evidence:
        """Return the row ``kept``, or all of the sample if rows cannot be separated, in memory of its own: a view would
        keep the whole sample alive."""
        axis = self._batch_axis
        header = Header(
            model=verdict.model,
            version=verdict.version,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            profile=sample.profile,
            precision=sample.precision,
            rows=sample.rows if kept is None else 1,
            of_rows=sample.rows,
            batch_axis=axis,
            budget=self._budget.as_dict(),
            drift={output: asdict(each) for output, each in drift.items()},
            verdict=to_json(verdict),
            files=self._files,
            versions=self._versions,
        )
        feeds, served, reference = (copies(arrays, kept, axis) for arrays in parts)
        return Evidence(header, feeds, served, reference)

    def _ratio(self, drift: _RowDrift, verdict: DriftVerdict) -> float:
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
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
