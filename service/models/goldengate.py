"""The golden gate: runs a model's golden samples before it is ready, and again while it serves.

A model that passed when it was loaded can be damaged later, in memory or on its device.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TypeAlias

from bf16kit.artifact.artifact import Artifact, Golden
from bf16kit.drift.metrics import Breach
from bf16kit.messages.errors import ArtifactError, Bf16kitError, BudgetExceeded, InvalidRequest
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import check_feeds
from bf16kit.runtime import Runtime
from bf16kit.service.contract import GATE_FAILED, Array
from bf16kit.service.drift.contract import DriftVerdict
from bf16kit.service.drift.gate import Outcome, ProcessRank, Timetable, breach_verdict, judge, run_in_parts
from bf16kit.service.models.opened import OpenedArtifact
from bf16kit.service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
#: Golden samples in one run, of up to 64 that there are: attention over long sequences takes gigabytes for so many.
GOLDEN_ROWS = 8
_RUN_SECONDS = 300.0  # time limit of one run; another thread answers requests meanwhile
_REMEDY = (
    "its results changed since it was loaded; load it again (restart the server, or unload and load the"
    " model); if it happens again, check the machine's memory and the device"
)
Run: TypeAlias = Callable[[Mapping[str, Array]], dict[str, Array]]
OnVerdict: TypeAlias = Callable[[DriftVerdict], object]


def golden_of(artifact: Artifact, profile: str | None = None) -> Golden | None:
    """Return the artifact's golden samples, or None. A profile's own samples take precedence.

    Raises ArtifactError if the inputs do not fit the model.
    """
    manifest = artifact.manifest
    name = manifest.golden_of(profile)
    if name is None:
        return None
    golden, path, axis = artifact.golden(profile), artifact.path / name, manifest.batch_axis
    try:
        check_feeds([entry.spec() for entry in manifest.inputs], golden.inputs)
    except InvalidRequest as error:
        raise ArtifactError(f"{path}: {error}") from None
    for name, array in golden.inputs.items():
        if axis is not None and axis < array.ndim and not array.shape[axis]:
            raise ArtifactError(f"{path}: input {name!r} has shape {list(array.shape)}, which is less than one sample")
    return golden


def check_golden(run: Run, opened: OpenedArtifact, golden: Golden | None) -> str:
    """Run the golden samples and check their drift against the budget; return a summary for the log.

    Raises :class:`BudgetExceeded` naming the output, the metric, the measured value and the bound.
    """
    if golden is None:
        return "no golden samples in the artifact, accuracy not checked"
    breaches, summary = _judge(run, opened, golden)
    if breaches:
        raise BudgetExceeded(f"golden samples are over the drift budget: {'; '.join(map(str, breaches))}")
    return f"golden samples within budget ({summary})"


def _judge(run: Run, opened: OpenedArtifact, golden: Golden) -> tuple[list[Breach], str]:
    most_rows = min(opened.max_batch_size or GOLDEN_ROWS, GOLDEN_ROWS)
    outputs = run_in_parts(run, golden.inputs, opened.batch_axis, most_rows)
    return judge(golden.outputs, outputs, opened.outputs, opened.batch_axis, opened.golden_budget, golden.scales)


class GoldenGate:
    """The golden gate of one generation. :meth:`run` is for one thread, the rest for any.

    ``passed`` says how the samples came out at load. ``seconds`` is the time between two scheduled runs. ``on_verdict``
    receives the verdict of every gate that failed, and of a gate that could not be run twice in a row, since a single
    error may be a short lack of memory.
    """

    def __init__(
        self,
        name: str,
        version: int,
        opened: OpenedArtifact,
        runtime: Runtime,
        golden: Golden | None,
        passed: str,
        metrics: ModelMetrics,
        *,
        seconds: float,
        rank: ProcessRank,
        on_verdict: OnVerdict,
    ) -> None:
        self.description = passed
        self._name, self._version = name, version
        self._label = f"model {name!r} version {version}"
        self._opened = opened
        self._run = partial(runtime.run, seconds=_RUN_SECONDS)
        self._golden = golden
        self._metrics = metrics
        self._on_verdict = on_verdict
        self._errors = 0
        self._outcome: Outcome = "passed"
        self.timetable = Timetable(0.0 if golden is None else seconds, rank, time.monotonic(), random.random)
        if golden is not None:
            metrics.gate("passed", time.time())  # loading has checked the samples already

    def note_failed_run(self) -> None:
        """Note that a run has failed, so that the gate is run soon."""
        if self._golden is not None:
            self.timetable.note_failed_run()

    def run(self, reason: str) -> Outcome:
        """Run and judge the golden samples; record, log and report the outcome. ``reason`` is for the log."""
        golden, breaches, summary, error = self._golden, list[Breach](), "", ""
        assert golden is not None  # noqa: S101 -- nothing is due without
        try:
            breaches, summary = _judge(self._run, self._opened, golden)
        except Bf16kitError as found:
            error = brief(found)
        except Exception as bug:  # noqa: BLE001 -- the gates of other models must go on
            _log.exception("%s: the golden gate failed unexpectedly", self._label)
            error = type(bug).__name__
        outcome: Outcome = "error" if error else "failed" if breaches else "passed"
        self._errors = self._errors + 1 if error else 0
        at = time.time()
        self._describe(outcome, reason, at, "; ".join(map(str, breaches)) or error or summary)
        self._outcome = outcome
        self._metrics.gate(outcome, at)
        if outcome == "failed" or self._errors > 1:
            axis = self._opened.batch_axis
            rows = 1 if axis is None else int(next(iter(golden.inputs.values())).shape[axis])
            self._on_verdict(
                breach_verdict(self._name, self._version, breaches, self._opened.budget, rows, time.monotonic())
            )
        return outcome

    def _describe(self, outcome: Outcome, reason: str, at: float, found: str) -> None:
        """Log the outcome, and set :attr:`description`.

        The text of an error goes to the log alone: clients can read the description in the metadata.
        """
        label, moment = self._label, datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        if outcome == "passed":
            self.description = f"golden samples within budget ({found}), run again {moment}"
            level = logging.INFO if self._outcome != "passed" else logging.DEBUG
            _log.log(level, "%s: golden gate passed %s (%s)", label, reason, found)
        elif outcome == "error":
            self.description = f"{GATE_FAILED} {moment}: the golden samples could not be run; the server's log says why"
            _log.error("%s: golden gate %s: the golden samples could not be run: %s", label, reason, found)
        else:
            over = f"golden samples are over the drift budget: {found}"
            self.description = f"{GATE_FAILED} {moment}: {over}"
            _log.error("%s: golden gate failed %s: %s; %s", label, reason, over, _REMEDY)
