"""What one generation reports of its batches and requests: in statistics that count as Triton does, and in metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp

from bf16kit.service.contract import infer
from bf16kit.service.models import loading
from bf16kit.service.models.generation import Generation
from bf16kit.service.models.serving import load_serving
from bf16kit.service.request import Observation, Request
from bf16kit.service.telemetry.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def model(tmp_path: Path, metrics: Metrics, request: pytest.FixtureRequest) -> Iterator[Generation]:
    """Yield a generation with the ``max_batch_size`` that the test is parametrized with."""
    path = tmp_path / "mlp" / "1"
    write_mlp(path)
    (tmp_path / "mlp" / "serving.yaml").write_text(f"max_batch_size: {request.param}\nshadow: {{rate: 0}}", "utf-8")
    serving = load_serving(tmp_path / "mlp")
    loaded = loading.load(path, serving, device="cpu", threads=1)
    model = Generation("mlp", 1, loaded, serving, lambda: metrics.add("mlp", 1))
    yield model
    assert model.close(time.monotonic() + 20)


def rows(count: int) -> Request:
    return Request({"x": np.zeros((count, 16), np.float32)}, rows=count)


def sample(metrics: Metrics, name: str) -> float:
    lines = metrics.expose()[0].decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + '{model="mlp"'))


@pytest.mark.parametrize("model", [0], indirect=True)
def test_without_batching_a_request_is_one_inference_whatever_its_number_of_rows(
    model: Generation, metrics: Metrics
) -> None:
    for count in range(1, 6):
        infer(model, rows(count))
    seen = model.statistics
    assert (seen.inference_count, seen.execution_count) == (5, 5)
    assert [batch.batch_size for batch in seen.batches] == [1]
    assert sample(metrics, "bf16kit_rows_total") == 15
    assert sample(metrics, "bf16kit_batch_rows_sum") == 15


@pytest.mark.parametrize("model", [8], indirect=True)
def test_one_observation_is_counted_once_in_the_statistics_and_in_the_metrics(
    model: Generation, metrics: Metrics
) -> None:
    request = rows(1)
    infer(model, request)
    assert model.statistics.success.count == 0  # a request is over only when its response is encoded
    model.observe(Observation("mlp", "1", "id", "OK", 0.25, request.timings))
    model.observe(Observation("mlp", "1", "id", "INTERNAL", 0.5, request.timings))
    seen = model.statistics
    assert (seen.success.count, seen.success.ns, seen.fail.count, seen.fail.ns) == (1, 250_000_000, 1, 500_000_000)
    assert seen.queue.count == 1
    assert sample(metrics, "bf16kit_request_duration_seconds_sum") == 0.25  # the failed request is not a fast one
    assert sample(metrics, "bf16kit_queue_duration_seconds_count") == 2
