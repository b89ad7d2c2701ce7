"""The golden gate of a ready model: runs its golden samples again, on the runtimes that answer requests.

:func:`service.models.firstruns.check_golden` is the gate before a model is ready. A loaded model can be damaged later:
in memory, on its device, or in a mapped file.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from bf16kit.drift.metrics import Breach
from bf16kit.messages.errors import Bf16kitError
from bf16kit.messages.wording import brief
from service.contract import GATE_FAILED
from service.drift.gate import Outcome, ProcessRank, Timetable, breach_verdict
from service.drift.shadow import lower_priority
from service.drift.verdict import DriftVerdict
from service.models.firstruns import judge_golden
from service.models.lease import Lease
from service.models.loading import LoadedModel
from service.telemetry.modelmetrics import ModelMetrics

if TYPE_CHECKING:
    from service.models.generation import Generation

_log = logging.getLogger(__name__)
_CHECK_SECONDS = 1.0  # how often the schedule is checked
_REMEDY = (
    "its results changed since it was loaded; load it again (restart the server, or unload and load the"
    " model); if it happens again, check the machine's memory and the device"
)

OnVerdict = Callable[[DriftVerdict], None]


def ignore_verdict(verdict: DriftVerdict) -> None:
    """Ignore the verdict of a golden gate."""


class GoldenGate:
    """The golden gate of one generation. :meth:`run` is for one thread, the rest for any.

    ``on_verdict`` receives the verdict of every gate that failed, and of a gate that could not be run twice in a row,
    since a single error may be a short lack of memory. Passed gates are not reported.
    """

    def __init__(
        self,
        name: str,
        version: int,
        loaded: LoadedModel,
        metrics: ModelMetrics,
        *,
        seconds: float,
        rank: ProcessRank = ProcessRank(),  # noqa: B008 -- frozen
        on_verdict: OnVerdict = ignore_verdict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._name = name
        self._version = version
        self._opened = loaded.opened
        self._golden = loaded.samples
        self._runtimes = [loaded.runtime, *([] if loaded.narrow is None else [loaded.narrow])]
        self._metrics = metrics
        self._on_verdict = on_verdict
        self._clock = clock
        self._errors = 0
        self._outcome: Outcome = "passed"
        self.description = loaded.golden
        self.timetable = Timetable(seconds if self._golden is not None else 0.0, rank, time.monotonic(), random.random)
        if self._golden is not None:
            metrics.gate("passed", clock())  # loading has checked the samples already

    def note_failed_run(self) -> None:
        """Note that a run has failed, so that the gate is run soon."""
        if self._golden is not None:
            self.timetable.note_failed_run()

    def run(self, reason: str) -> Outcome:
        """Run and judge the golden samples; record, log and report the outcome. ``reason`` is for the log."""
        breaches: list[Breach] = []
        description = error = ""
        try:
            description = self._judge(breaches)
        except Bf16kitError as found:
            error = brief(found)
        except Exception as bug:  # noqa: BLE001 -- the gates of other models must go on
            _log.exception("%s: the golden gate failed unexpectedly", self._label)
            error = type(bug).__name__
        outcome: Outcome = "error" if error else "failed" if breaches else "passed"
        self._errors = self._errors + 1 if error else 0
        at = self._clock()
        moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        if outcome == "passed":
            self.description = f"golden samples within budget ({description}), run again {moment}"
            _log.log(
                logging.INFO if self._outcome != "passed" else logging.DEBUG,
                "%s: golden gate passed %s (%s)", self._label, reason, description,
            )  # fmt: skip
        else:
            self._log_failure(outcome, reason, moment, breaches, error)
        self._outcome = outcome
        self._metrics.gate(outcome, at)
        if outcome == "failed" or self._errors > 1:
            self._on_verdict(breach_verdict(self._name, self._version, breaches, self._opened.budget, self._rows, at))
        return outcome

    @property
    def _label(self) -> str:
        return f"model {self._name!r} version {self._version}"

    @property
    def _rows(self) -> int:
        axis, golden = self._opened.batch_axis, self._golden
        if axis is None or golden is None:
            return 1
        return int(next(iter(golden.inputs.values())).shape[axis])

    def _judge(self, breaches: list[Breach]) -> str:
        """Run the samples on every runtime, and add to ``breaches``. Returns the last run's drift as text."""
        assert self._golden is not None  # noqa: S101 -- nothing is due without
        opened, description = self._opened, ""
        for runtime in self._runtimes:
            run = partial(runtime.run, seconds=opened.first_run_seconds)
            found, description = judge_golden(run, opened, self._golden)
            breaches += found
        return description

    def _log_failure(self, outcome: Outcome, reason: str, moment: str, breaches: list[Breach], error: str) -> None:
        """Log a gate that was not passed, and set :attr:`description`.

        The text of an error goes to the log alone: clients can read the description in the metadata.
        """
        if outcome == "error":
            self.description = f"{GATE_FAILED} {moment}: the golden samples could not be run; the server's log says why"
            _log.error("%s: golden gate %s: the golden samples could not be run: %s", self._label, reason, error)
            return
        found = "; ".join(map(str, breaches))
        self.description = f"{GATE_FAILED} {moment}: golden samples are over the drift budget: {found}"
        _log.error(
            "%s: golden gate failed %s: golden samples are over the drift budget: %s; %s",
            self._label, reason, found, _REMEDY,
        )  # fmt: skip


class GoldenSchedule:
    """Runs the gates that are due, one model after another, on one thread of low priority.

    ``serving`` returns the generations that answer; ``changed`` is called after each gate. A model that is unloaded
    during its gate is freed when the gate is over.
    """

    def __init__(
        self,
        serving: Callable[[], Iterable[Generation]],
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serving = serving
        self._changed = changed
        self._clock = clock
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="golden-gate", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin no more gates. A gate that is running holds a lease, so unloading its model waits for it."""
        self._stopped.set()

    def run_due(self) -> None:
        """Run the gates that are due."""
        for model in self._serving():
            reason = model.gate.timetable.due_reason(self._clock())
            if not reason or self._stopped.is_set() or not model.leases.acquire():
                continue
            with Lease(model.leases, model):
                model.gate.timetable.begin()
                outcome = model.gate.run(reason)
                model.gate.timetable.end(self._clock(), outcome)
            self._changed()

    def _work(self) -> None:
        lower_priority()
        while not self._stopped.wait(_CHECK_SECONDS):
            try:
                self.run_due()
            except Exception:  # noqa: BLE001 -- this thread must live on
                _log.exception("the golden gate's schedule failed; it will run again")
