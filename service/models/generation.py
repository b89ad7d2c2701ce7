"""One version of one model, from its directory to its answers: loading → ready, or unavailable with the reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from bf16kit.errors import Bf16kitError, Unavailable
from bf16kit.runtime import Runtime, RuntimeInfo
from bf16kit.tensors import TensorSpec
from service.batching.batcher import Batcher, BatchPolicy
from service.contract import Reply, Request, State, Timings
from service.drift.comparison import Comparison
from service.drift.shadow import Shadow
from service.models import loading
from service.models.policy import Serving
from service.telemetry.metrics import ModelMetrics
from service.telemetry.statistics import ModelStatistics

_log = logging.getLogger(__name__)
_NOT_LOADED = RuntimeInfo("none", "none", "none", "none", "unknown")


class ServedModel:
    """See :class:`service.contract.Model`. :meth:`load` is called once, on any thread; :meth:`close` at the end.

    ``changed`` is called after every change of :attr:`state`. ``device`` is the server's ``--device``, ``threads`` what
    one execution may use (None = the runtime's choice).
    """

    def __init__(
        self,
        name: str,
        version: int,
        path: Path,
        serving: Serving,
        metrics: ModelMetrics,
        changed: Callable[[], None],
        *,
        device: str = "auto",
        threads: int | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.state: State = "loading"
        self.reason = "loading"
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.batch_axis: int | None = None
        self.max_batch_size = 0
        self.max_queue_delay_s = serving.max_queue_delay_ms / 1e3
        self.instances = serving.instances
        self.info = _NOT_LOADED
        self.statistics = ModelStatistics()
        self.metrics = metrics
        self._path = path
        self._serving = serving
        self._changed = changed
        self._device = device
        self._threads = threads
        self._runtime: Runtime | None = None
        self._batcher: Batcher | None = None
        self._shadow: Shadow | None = None

    @property
    def label(self) -> str:
        return f"model {self.name!r} version {self.version}"

    def load(self) -> None:
        """Walk the lifecycle; never raises. A model that may not answer ends ``unavailable``, its reason in the log."""
        begun = time.monotonic()
        try:
            summary = self._load()
        except Bf16kitError as error:
            self.close()
            self.fail(str(error))
        except Exception:  # noqa: BLE001 - a bug in loading one model must not take the others down
            _log.exception("%s: loading failed unexpectedly", self.label)
            self.close()
            self.fail("an unexpected error, see the server's log")
        else:
            seconds = time.monotonic() - begun
            self.metrics.ready(True, seconds)
            _log.info("%s is ready after %.2f s: %s", self.label, seconds, summary)  # first: who sees it ready can look
            self.state, self.reason = "ready", ""
            self._changed()

    def fail(self, reason: str) -> None:
        """Never ready: the reason goes to the log, the status page and the repository's index."""
        _log.error("%s is unavailable: %s", self.label, reason)
        self.metrics.ready(False)
        self.state, self.reason = "unavailable", reason
        self._changed()

    def infer(self, request: Request) -> Reply:
        """See :meth:`service.contract.Model.infer`."""
        batcher = self._batcher
        if batcher is None:
            raise Unavailable(f"{self.label} is not ready; try again later")
        begun = time.monotonic()
        self.metrics.in_flight(1)
        try:
            reply = batcher.submit(request)
        except Exception:
            self.statistics.failure(time.monotonic() - begun)
            raise
        finally:
            self.metrics.in_flight(-1)
        self.statistics.success(time.monotonic() - begun, reply.timings)
        self.metrics.waited(reply.timings.queue)
        shadow = self._shadow
        if shadow is not None:
            shadow.offer(request, reply)
        return reply

    def start_shadow(self) -> None:
        """Begin to load the reference: after every model is ready, because it must delay none of them."""
        if self._shadow is not None:
            self._shadow.start()

    def close(self) -> None:
        """Refuse what waits, end the threads, free the device's memory."""
        batcher, self._batcher = self._batcher, None
        shadow, self._shadow = self._shadow, None
        runtime, self._runtime = self._runtime, None
        if batcher is not None:
            batcher.close()
        if shadow is not None:
            shadow.close()
        if runtime is not None:
            runtime.close()

    # --- observing the batcher ----------------------------------------------------------------------------------------

    def rejected(self, reason: str, waited_s: float) -> None:
        self.metrics.rejected(reason)
        if waited_s:
            self.metrics.waited(waited_s)

    def queued(self, change: int) -> None:
        self.metrics.queued(change)

    def executed(self, requests: int, rows: int, timings: Timings) -> None:
        # Where batching is off, Triton counts every request as one inference, whatever it holds.
        self.statistics.execution(requests, rows if self.max_batch_size else requests, timings)
        self.metrics.executed(rows, timings.compute)

    # --- loading ------------------------------------------------------------------------------------------------------

    def _load(self) -> str:
        from bf16kit.runtime.loading import choose_profile, load

        opened = loading.open_artifact(self._path, self._serving)
        self._describe(opened)
        profile, device = choose_profile(opened.artifact, self._device)
        runtime = self._runtime = load(opened.artifact, profile, device=device, threads=self._threads)
        self.info = runtime.info
        self.metrics.loaded(runtime.info, loading.baseline(opened.artifact.manifest, profile))
        if runtime.info.accumulation != "fp32":
            _log.warning("%s: the accumulation probe found %s, not fp32", self.label, runtime.info.accumulation)
        golden = loading.golden_of(opened.artifact)
        loading.warm_up(runtime, opened, self._serving.warmup, golden)
        verdict = loading.check_golden(runtime, opened, golden)
        self._batcher = self._new_batcher(runtime)
        self._batcher.start()
        self._shadow = self._new_shadow(opened)
        return f"{_describe(runtime.info)}; {_batches(self.max_batch_size)}; {verdict}"

    def _describe(self, opened: loading.Opened) -> None:
        self.inputs, self.outputs = opened.inputs, opened.outputs
        self.batch_axis, self.max_batch_size = opened.batch_axis, opened.max_batch_size
        self.statistics.weight_bytes = opened.weight_bytes
        self.metrics.opened(opened.weight_bytes, opened.outputs, opened.budget.as_dict())

    def _new_batcher(self, runtime: Runtime) -> Batcher:
        policy = BatchPolicy(
            axis=self.batch_axis,
            max_rows=self.max_batch_size,
            max_delay_s=self.max_queue_delay_s,
            max_bytes=self._serving.max_queue_bytes,
            levels=self._serving.levels(),
            default_level=self._serving.default_priority_level,
            instances=self.instances,
            # torch's thread pools and CUDA's handles belong to the thread that runs: there, only the executors may run.
            inline=runtime.info.backend == "onnxruntime" and runtime.info.device == "cpu",
        )
        return Batcher(runtime.run, policy, self, name=f"{self.name}-{self.version}")

    def _new_shadow(self, opened: loading.Opened) -> Shadow | None:
        if self._serving.shadow.rate == 0:
            return None
        if opened.artifact.manifest.reference is None:
            _log.warning("%s: no live drift: the artifact holds no fp32 reference", self.label)
            return None
        from bf16kit.runtime.loading import load_reference

        artifact = opened.artifact
        return Shadow(
            lambda: load_reference(artifact, threads=1, low_priority=True),
            Comparison(opened.outputs, opened.batch_axis, opened.budget),
            self._serving.shadow,
            self.metrics,
            name=self.label,
            batch_axis=opened.batch_axis,
        )


def _describe(info: RuntimeInfo) -> str:
    kernel = f", kernel {info.kernel}" if info.kernel else ""
    note = f" ({info.note})" if info.note else ""
    return (
        f"{info.backend} on {info.device}, profile {info.profile}, precision {info.precision},"
        f" accumulation {info.accumulation}{kernel}{note}"
    )


def _batches(max_batch_size: int) -> str:
    return f"batches of up to {max_batch_size} rows" if max_batch_size else "no batching"
