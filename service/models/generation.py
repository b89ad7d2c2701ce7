"""One loaded generation of a model's version: immutable, and replaced as a whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from bf16kit.messages.errors import InputRefused, RuntimeFailure, Unsupported
from bf16kit.runtime import Runtime, RuntimeInfo
from service.batching.batcher import Batcher
from service.batching.policy import BatchPolicy
from service.contract import ActivePrecision, Array, Bounds, TensorSemantics
from service.drift.gate import ProcessRank
from service.drift.probe import Probe
from service.drift.sampling import SampleForwarder, SampleSender
from service.models.engine import Engine, ParallelEngine, SwitchedEngine
from service.models.goldengate import GoldenGate, OnVerdict, ignore_verdict
from service.models.lease import Leases
from service.models.loading import LoadedModel
from service.models.opening import OpenedArtifact, baseline
from service.models.policy import Serving
from service.models.standby import ReferenceStandby
from service.request import Claim, Observation, Precision, Reply, Request, Timings
from service.telemetry.modelmetrics import ModelMetrics
from service.telemetry.modelstatistics import ModelStatistics

_log = logging.getLogger(__name__)
_LEAST_CLOSE_S = 0.2  # the least time for idle threads to end, even after the deadline


def _no_reference() -> Runtime:
    raise Unsupported("no fp32 reference can be loaded here")


class Generation:
    """See :class:`service.contract.Model`. It answers until :meth:`close`. ``metrics`` are its own."""

    def __init__(
        self,
        name: str,
        version: int,
        loaded: LoadedModel,
        serving: Serving,
        new_metrics: Callable[[], ModelMetrics],
        sender: SampleSender | None = None,
        on_verdict: OnVerdict = ignore_verdict,
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
        opened, info = loaded.opened, loaded.info
        self.since = time.time()
        self.name = name
        self.version = version
        self.inputs, self.outputs = opened.inputs, opened.outputs
        self.batch_axis, self.max_batch_size = opened.batch_axis, opened.max_batch_size
        self.max_queue_delay_s = serving.max_queue_delay_ms / 1e3
        self.instances = loaded.instances
        self.bounds = Bounds(serving.max_dims, serving.max_response_bytes)
        self.semantics = TensorSemantics(serving.labels, serving.formats)
        self.scheduling = serving.scheduling()
        self.info: RuntimeInfo = info
        self.budget = opened.budget.as_dict()
        self.statistics = ModelStatistics(opened.weight_bytes)
        self.leases = Leases()
        bf16 = Engine(loaded.runtime) if loaded.narrow is None else ParallelEngine(loaded.runtime, loaded.narrow)
        self._engine = SwitchedEngine(bf16)
        self._batcher = self._new_batcher(loaded, serving)
        self._batcher.start()
        metrics = self.metrics = new_metrics()
        self._standby = ReferenceStandby(self.label, self._engine, fp32, self._on_switch, metrics.fallback_failed)
        self._changed = changed
        self._probe: Probe | None = None
        self._shadow = self._new_shadow(opened, serving, sender)
        metrics.opened(opened.weight_bytes, opened.outputs)
        metrics.loaded(info, baseline(opened.artifact.manifest, info.profile), self.budget)
        self.gate = GoldenGate(
            name, version, loaded, metrics, seconds=serving.golden_seconds, rank=rank, on_verdict=on_verdict
        )

    @property
    def label(self) -> str:
        return f"model {self.name!r} version {self.version}"

    @property
    def golden(self) -> str:
        """See :attr:`service.contract.Model.golden`."""
        return self.gate.description

    def infer(self, request: Request) -> Reply:
        """See :meth:`service.contract.Model.infer`."""
        self.metrics.in_flight(1)
        try:
            reply = self._batcher.submit(request)
        finally:
            self.metrics.in_flight(-1)
        self.metrics.answered(reply.reported_precision)
        if self._shadow is not None:
            self._shadow.offer(request, reply)
        return reply

    @property
    def active_precision(self) -> ActivePrecision:
        """See :class:`service.contract.Model`."""
        return self._standby.active_precision

    def switch_precision(self, precision: Precision, reason: str) -> Future[None]:
        """See :meth:`service.models.standby.ReferenceStandby.order`."""
        return self._standby.order(precision, reason)

    def _on_switch(self, active: ActivePrecision) -> None:
        self.metrics.fallback(active.precision == "fp32")
        self._changed()

    def claim(self, nbytes: int) -> Claim | None:
        """See :meth:`service.contract.Model.claim`. The measured run times are those of bf16."""
        return None if self.active_precision.precision == "fp32" else self._batcher.claim(nbytes)

    def observe(self, seen: Observation) -> None:
        """See :meth:`service.contract.Model.observe`."""
        self.metrics.request(seen)
        self.statistics.request(seen)

    def close(self, deadline: float) -> bool:
        """Wait for the leases, reject waiting requests, end the threads, free the device's memory.

        Returns False if a request or a batch was still running at ``deadline`` (in :func:`time.monotonic` seconds). It
        is left behind, and logged.
        """
        self.leases.end()
        self._standby.close()
        for drift_part in (self._shadow, self._probe):
            if drift_part is not None:
                drift_part.stop()
        running = [] if self.leases.wait(deadline) else ["requests"]
        deadline = max(deadline, time.monotonic() + _LEAST_CLOSE_S)
        if not self._batcher.close(deadline):
            running.append("a batch")
        if self._probe is not None and not self._probe.close(deadline):
            running.append("a sample that bf16 runs beside fp32")
        if self._shadow is not None:
            self._shadow.close()
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
        # With batching off, Triton counts every request as one inference, whatever its number of rows.
        self.statistics.execution(requests, rows if self.max_batch_size else requests, timings)
        self.metrics.executed(rows, timings.compute)

    # --- what the batcher runs ----------------------------------------------------------------------------------------

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """See :meth:`Engine.run`. After a failure that no input caused, have the golden gate check the device."""
        try:
            return self._engine.run(feeds, outputs)
        except InputRefused:
            raise
        except RuntimeFailure:
            self.gate.note_failed_run()
            raise

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _new_batcher(self, loaded: LoadedModel, serving: Serving) -> Batcher:
        # torch's thread pools and CUDA's handles belong to one thread each, so there only executors may run batches.
        any_thread = self.info.backend == "onnxruntime" and self.info.device == "cpu"
        policy = BatchPolicy(
            axis=self.batch_axis,
            max_rows=self.max_batch_size,
            max_delay_s=self.max_queue_delay_s,
            max_bytes=serving.max_queue_bytes,
            levels=serving.levels(),
            default_level=serving.default_priority_level,
            instances=self.instances,
            beside=serving.beside if any_thread else 0,
            inline=any_thread,
            claimable=any_thread and loaded.cost_by_size,
        )
        return Batcher(self._run, policy, self, name=f"{self.name}-{self.version}")

    def _new_shadow(
        self, opened: OpenedArtifact, serving: Serving, sender: SampleSender | None
    ) -> SampleForwarder | None:
        if sender is None or not serving.shadow.on:
            return None
        if opened.artifact.manifest.reference is None:
            _log.warning("%s: no live drift: the artifact holds no fp32 reference", self.label)
            return None
        self._probe = Probe(self.label, self.info.precision, self._engine.bf16.run, sender, serving.shadow.max_bytes)
        return SampleForwarder(
            self._probe, serving.shadow, self.metrics,
            batch_axis=opened.batch_axis, inputs=opened.inputs, profile=self.info.profile,
        )  # fmt: skip
