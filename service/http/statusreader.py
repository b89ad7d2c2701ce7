"""What ``/status.json`` holds: the server's models and their metrics, as plain values. The status page draws it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import bf16kit
from service.contract import Overview, SlotView

# A third of all values, which the page does not show: distributions are for Prometheus.
_LEFT_OUT = tuple(
    f"bf16kit_{name}"
    for name in ("batch_rows", "drift_cosine_distance", "drift_max_abs", "drift_pooled", "drift_relative_l2")
)
#: Returns the current samples of the server; each has a ``name``, ``labels`` and a ``value``.
Samples = Callable[[], Iterable[Any]]


class StatusReader:
    """Reads a registry and the metrics. ``off_reason`` returns why a version's fp32 reference stays off, or ""."""

    def __init__(
        self,
        registry: Overview,
        samples: Samples,
        *,
        workers: int = 1,
        off_reason: Callable[[str, int], str] = lambda model, version: "",
    ) -> None:
        self._registry = registry
        self._samples = samples
        self._workers = workers
        self._off_reason = off_reason
        self._started = time.monotonic()
        self._ports = 0, 0

    def listening(self, grpc_port: int, http_port: int) -> None:
        """Set the ports, once they are known."""
        self._ports = grpc_port, http_port

    def snapshot(self) -> dict[str, Any]:
        """Return the server and its models at this moment."""
        metrics, now = _by_model(self._samples()), time.time()
        return {
            "at": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
            "at_seconds": now,
            "version": bf16kit.__version__,
            "uptime_seconds": round(time.monotonic() - self._started, 1),
            "workers": self._workers,
            "grpc_port": self._ports[0],
            "http_port": self._ports[1],
            "ready": self._registry.ready,
            "models": [self._model(slot, metrics) for slot in self._registry.models()],
            "rejected_early": metrics.get(("", ""), {}).get("bf16kit_refused_total", {}),
        }

    def _model(self, slot: SlotView, metrics: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
        return {
            "name": slot.name,
            "version": slot.version,
            "state": slot.state,
            "reason": slot.reason,
            "reference_off": self._off_reason(slot.name, slot.version),
            "running": slot.running,
            "metrics": metrics.get((slot.name, str(slot.version)), {}),
        }


def _by_model(samples: Iterable[Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return values by model and version, then by name, then by the values of further labels, ``output`` first."""
    models: dict[tuple[str, str], dict[str, Any]] = {}
    for sample in samples:
        if sample.name.startswith(_LEFT_OUT):
            continue
        labels = dict(sample.labels)
        at = models.setdefault((labels.pop("model", ""), labels.pop("version", "")), {})
        *path, last = sample.name, *(labels[label] for label in sorted(labels, reverse=True))
        for part in path:
            at = at.setdefault(part, {})
        at[last] = sample.value if math.isfinite(sample.value) else str(sample.value)  # JSON has no infinity: "inf"
    return models
