"""One loaded generation of a model's version: immutable, and replaced as a whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from bf16kit.messages.errors import InputRefused, RuntimeFailure, Unsupported
from bf16kit.runtime import Runtime, RuntimeInfo
from bf16kit.service.batching.batcher import Batcher
from bf16kit.service.batching.queue import BatchPolicy
from bf16kit.service.contract import ActivePrecision, Array, Bounds, StatisticsSnapshot, TensorSemantics
from bf16kit.service.drift.gate import ProcessRank
from bf16kit.service.drift.sampler import SampleForwarder, SampleSender
from bf16kit.service.models.engine import Engine, Leases
from bf16kit.service.models.goldengate import GoldenGate, OnVerdict
from bf16kit.service.models.loading import LoadedModel
from bf16kit.service.models.opened import baseline
from bf16kit.service.models.serving import Serving
from bf16kit.service.request import Done, Observation, Precision, Reply, Request, Timings
from bf16kit.service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
_LEAST_CLOSE_S = 0.2  # the least time for idle threads to end, even after the deadline


def _no_reference() -> Runtime:
    raise Unsupported("no fp32 reference can be loaded here")


class Generation:
    """See :class:`bf16kit.service.contract.Model`. It answers until :meth:`close`. ``metrics`` are its own."""

    def __init__(
        self,
        name: str,
        version: int,
        loaded: LoadedModel,
        serving: Serving,
        new_metrics: Callable[[], ModelMetrics],
        sender: SampleSender | None = None,
        on_verdict: OnVerdict = lambda verdict: None,
        rank: ProcessRank = ProcessRank(),  # noqa: B008 -- frozen
        *,
        fp32: Callable[[], Runtime] = _no_reference,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """``new_metrics`` creates its metrics, once its threads run: those of the generation that it replaces end then.

        ``sender`` sends samples to the process that has the reference; None: drift is not measured.

        ``on_verdict`` and ``rank`` are for the golden gate. ``fp32`` loads a reference that can answer. ``changed`` is
        called, on any thread, when another precision answers. Raises RuntimeError if the system cannot start its
        threads; ``loaded`` is left open then.
        """
        opened = loaded.opened
        self.since = time.monotonic()
        self.name, self.version = name, version
        self.label = f"model {name!r} version {version}"
        self.inputs, self.outputs = opened.inputs, opened.outputs
        self.batch_axis, self.max_batch_size = opened.batch_axis, opened.max_batch_size
        self.max_queue_delay_s = serving.max_queue_delay_ms / 1e3
        self.instances = serving.instances
        self.bounds = Bounds(serving.max_dims)
        self.semantics = TensorSemantics(serving.labels)
        self.scheduling = serving.scheduling()
        self.info: RuntimeInfo = loaded.info
        self.budget = opened.budget.as_dict()
        self.leases = Leases()
        self._changed = changed
        self._engine = Engine(self.label, loaded.runtime, fp32, self._on_switch, lambda: self.metrics.fallback_failed())
        self._batcher = Batcher(self._run, self._batching(), self, name=f"{name}-{version}")
        self._batcher.start()
        metrics = self.metrics = new_metrics()
        self._shadow: SampleForwarder | None = None
        if sender is not None and serving.shadow.on:
            self._measure(loaded, serving, sender)
        metrics.opened(opened.weight_bytes, opened.outputs)
        metrics.loaded(self.info, baseline(opened.artifact.manifest, self.info.profile), self.budget)
        self.gate = GoldenGate(
            name, version, opened, loaded.runtime, loaded.samples, loaded.golden, metrics,
            seconds=serving.golden_seconds, rank=rank, on_verdict=on_verdict,
        )  # fmt: skip

    @property
    def golden(self) -> str:
        return self.gate.description

    def begin(self, request: Request, done: Done) -> None:
        def finish(result: Reply | Exception) -> None:
            if isinstance(result, Reply):
                self.metrics.ended(result.reported_precision)
                if self._shadow is not None:
                    self._shadow.offer(request, result)
            else:
                self.metrics.ended(None)
            done(result)

        self.metrics.began()
        try:
            self._batcher.begin(request, finish)
        except BaseException:
            self.metrics.ended(None)
            raise

    def release(self) -> None:
        self.leases.release()

    @property
    def statistics(self) -> StatisticsSnapshot:
        return self.metrics.statistics

    @property
    def active_precision(self) -> ActivePrecision:
        return self._engine.active_precision

    def switch_precision(self, precision: Precision, reason: str) -> Future[None]:
        """See :meth:`bf16kit.service.models.engine.Engine.order`."""
        return self._engine.order(precision, reason)

    def observe(self, seen: Observation) -> None:
        self.metrics.request(seen)

    def close(self, deadline: float) -> bool:
        """Wait for the leases, reject waiting requests, end the threads, free the device's memory.

        Returns False if a request or a batch was still running at ``deadline`` (in :func:`time.monotonic` seconds). It
        is left behind, and logged.
        """
        self.leases.end()
        self._engine.stop()
        if self._shadow is not None:
            self._shadow.stop()
        running = [] if self.leases.wait(deadline) else ["requests"]
        deadline = max(deadline, time.monotonic() + _LEAST_CLOSE_S)
        if not self._batcher.close(deadline):
            running.append("a batch")
        if self._shadow is not None and not self._shadow.close(deadline):
            running.append("a sample that bf16 runs beside fp32")
        self._engine.close()
        if running:
            _log.warning("%s: unloaded before these had ended: %s", self.label, " and ".join(running))
        return not running

    # --- observing the batcher ----------------------------------------------------------------------------------------

    def rejected(self, reason: str) -> None:
        self.metrics.rejected(reason)

    def queued(self, change: int) -> None:
        self.metrics.queued(change)

    def executed(self, requests: int, rows: int, timings: Timings) -> None:
        self.metrics.executed(requests, rows, timings, batching=self.max_batch_size > 0)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """Run a batch. After a failure that no input caused, have the golden gate check the device."""
        try:
            return self._engine.run(feeds, outputs)
        except InputRefused:
            raise
        except RuntimeFailure:
            self.gate.note_failed_run()
            raise

    def _on_switch(self, active: ActivePrecision) -> None:
        self.metrics.fallback(active.precision == "fp32")
        self._changed()

    def _batching(self) -> BatchPolicy:
        # torch's thread pools and CUDA's handles belong to one thread each: as many threads as batches at once there.
        any_thread = self.info.backend == "onnxruntime" and self.info.device == "cpu"
        bounds = self.scheduling.bounds
        return BatchPolicy(
            axis=self.batch_axis,
            max_rows=self.max_batch_size,
            max_delay_s=self.max_queue_delay_s,
            max_requests=bounds.max_requests,
            max_wait_s=bounds.max_wait_s,
            instances=self.instances,
            extra_instances=int(any_thread),  # one: what it pays, and for whom, is in docs/decisions/0052
            spare_threads=int(any_thread),
        )

    def _measure(self, loaded: LoadedModel, serving: Serving, sender: SampleSender) -> None:
        """Have live drift measured, if there is a reference to measure it against."""
        opened = loaded.opened
        if opened.artifact.manifest.reference is None:
            _log.warning("%s: no live drift: the artifact holds no fp32 reference", self.label)
            return
        self._shadow = SampleForwarder(
            sender, serving.shadow, self.metrics.sampled,
            name=self.label, batch_axis=opened.batch_axis,
            profile=self.info.profile, precision=self.info.precision, run_bf16=self._engine.run_bf16,
        )  # fmt: skip
