"""The contents of the status page as plain values, which can be rendered or sent as JSON."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import bf16kit
from bf16kit.numerics.tensors import BY_NAME, TensorSpec, describe
from service.contract import Model, Registry, Slot
from service.telemetry.history import TICK_SECONDS, TICKS, WINDOW_TICKS, EarlyRejections, History, RecentActivity

WINDOW_SECONDS = TICK_SECONDS * WINDOW_TICKS
SPAN_SECONDS = TICK_SECONDS * TICKS


@dataclass(frozen=True, slots=True)
class RuntimeView:
    """How a model runs. The fields up to ``note`` are those of :class:`bf16kit.runtime.RuntimeInfo`."""

    backend: str
    device: str
    profile: str
    choice: str
    precision: str
    accumulation: str
    kernel: str
    note: str
    golden: str
    weight_bytes: int
    max_batch_size: int
    max_queue_delay_seconds: float
    instances: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    budget: Mapping[str, float]
    active_precision: str = "bf16"  # the reason follows: why it is not bf16, or should not be
    active_precision_reason: str = ""

    @classmethod
    def of(cls, model: Model) -> RuntimeView:
        info = model.info
        return cls(
            backend=info.backend,
            device=info.device,
            profile=info.profile,
            choice=info.choice,
            precision=info.precision,
            accumulation=info.accumulation,
            kernel=info.kernel,
            note=info.note,
            active_precision=model.active_precision.precision,
            active_precision_reason=model.active_precision.reason,
            golden=model.golden,
            weight_bytes=model.statistics.snapshot().weight_bytes,
            max_batch_size=model.max_batch_size,
            max_queue_delay_seconds=model.max_queue_delay_s,
            instances=model.instances,
            inputs=tuple(map(_describe, model.inputs)),
            outputs=tuple(map(_describe, model.outputs)),
            budget=model.budget,
        )


@dataclass(frozen=True, slots=True)
class ModelView:
    """One version of a model. ``running`` is None if nothing answers, ``recent`` if nothing was counted."""

    name: str
    version: int
    state: str
    reason: str
    running: RuntimeView | None = None
    recent: RecentActivity | None = None
    reference_off: str = ""  # why its fp32 reference stays off; "" if it does not

    @property
    def label(self) -> str:
        return f"{self.name} ·\u00a0version\u00a0{self.version}"

    @property
    def drift_ratio(self) -> float | None:
        """The highest recent drift ÷ budget; None if nothing was measured."""
        if self.recent is None:
            return None
        return max((ratio for metrics in self.recent.ratios.values() for ratio in metrics.values()), default=None)

    @property
    def over_budget(self) -> bool:
        """Whether drift is over budget with confidence."""
        return self.recent is not None and self.recent.drift.over


@dataclass(frozen=True, slots=True)
class ServerView:
    """A server and its models at one moment."""

    at: str  # the moment, in UTC
    at_seconds: float  # the same in Unix seconds
    version: str
    uptime_seconds: float
    workers: int
    grpc_port: int
    http_port: int
    ready: bool
    models: tuple[ModelView, ...]
    door: EarlyRejections

    @property
    def not_ready(self) -> tuple[ModelView, ...]:
        """The models that keep the server from being ready."""
        return tuple(model for model in self.models if model.state != "ready")

    def as_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), allow_nan=False).encode()


class StatusReader:
    """Reads a registry and a history. ``clock`` returns Unix seconds."""

    def __init__(
        self,
        registry: Registry,
        history: History,
        *,
        workers: int = 1,
        clock: Callable[[], float] = time.time,
        off_reason: Callable[[str, int], str] = lambda model, version: "",
    ) -> None:
        """``off_reason`` returns why a version's fp32 reference stays off; "" if it does not."""
        self._registry = registry
        self._history = history
        self._workers = workers
        self._clock = clock
        self._off_reason = off_reason
        self._started = time.monotonic()
        self._ports = 0, 0

    def listening(self, grpc_port: int, http_port: int) -> None:
        """Set the ports, once they are known."""
        self._ports = grpc_port, http_port

    def snapshot(self) -> ServerView:
        """Return the server's current view."""
        now = self._clock()
        recent, rejections = self._history.read()
        slots = self._registry.models()
        models = tuple(self._view(slot, recent.get((slot.name, str(slot.version)))) for slot in slots)
        return ServerView(
            at=datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
            at_seconds=now,
            version=bf16kit.__version__,
            uptime_seconds=round(time.monotonic() - self._started, 1),
            workers=self._workers,
            grpc_port=self._ports[0],
            http_port=self._ports[1],
            ready=self._registry.ready,
            models=models,
            door=rejections,
        )

    def _view(self, slot: Slot, recent: RecentActivity | None) -> ModelView:
        model, reason = slot.model, slot.reason
        running = None if model is None else RuntimeView.of(model)
        off = self._off_reason(slot.name, slot.version)
        return ModelView(slot.name, slot.version, slot.state, reason, running, recent, off)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name}: {BY_NAME[spec.dtype].oip} {describe(spec.shape)}"
