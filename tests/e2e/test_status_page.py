"""The status page of a real server under load, as a program reads it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from artifacts import write_mlp
from serverprocess import Serve
from waiting import until
from workerprocesses import Client


@contextmanager
def asking(target: str) -> Iterator[None]:
    """Send requests of two rows until the ``with`` block ends; the server rejects one request in ten."""
    stop = threading.Event()

    def ask() -> None:
        with Client(target) as client:
            at = 0
            while not stop.wait(0.005):
                at += 1
                with suppress(grpc.RpcError):  # every tenth
                    client.infer(x=np.ones((2, 15 if at % 10 == 0 else 16), np.float32))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.long
def test_the_page_shows_the_numbers_of_a_model_under_load(tmp_path: Path, serve: Serve) -> None:
    repository = tmp_path / "repository"
    write_mlp(repository / "mlp" / "1")
    write_mlp(repository / "spoilt" / "1", spoil=0.5)
    (repository / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000}\n")
    server = serve("--repository", repository)

    def status() -> Any:
        return json.loads(server.get("/status.json")[1])

    def mlp() -> Any:
        metrics = status()["models"][0]["metrics"]
        return {name.removeprefix("bf16kit_"): value for name, value in metrics.items()}

    until(lambda: all(model["state"] != "loading" for model in status()["models"]), what="both models")
    with asking(server.target):
        until(lambda: mlp()["drift_samples_total"]["measured"] > 20, what="samples of drift")
        until(lambda: mlp().get("drift_effective_samples", {}).get("y", 0) > 8, what="recent drift")
    metrics, now = mlp(), status()["at_seconds"]
    codes, answered = metrics["requests_total"], metrics["requests_total"]["OK"]
    assert 0.05 < codes["INVALID_ARGUMENT"] / answered < 0.15
    assert metrics["rows_total"] == 2 * answered
    assert metrics["request_duration_seconds_bucket"]["+Inf"] == answered, "requests that failed are not timed"
    assert metrics["drift_effective_samples"]["y"] <= metrics["drift_samples_total"]["measured"]
    ratio, low = (metrics[f"drift_budget_ratio{end}"]["y"]["relative_l2"] for end in ("", "_low"))
    assert 0 < low <= ratio * (1 + 1e-9) < 1
    assert 0 <= now - metrics["drift_last_sample_timestamp_seconds"] < 60
    assert metrics["answers_total"] == {"bf16": answered, "fp32": 0}
    assert metrics["requests_in_flight"] == metrics["queue_depth"] == 0
