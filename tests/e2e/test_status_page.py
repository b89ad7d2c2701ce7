"""The status page of a real server under load, as a browser and as a program read it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp
from browser import Browser
from serverprocess import ServerProcess
from waiting import until

Serve = Callable[..., Any]  # see conftest.py


@contextmanager
def asking(target: str) -> Iterator[None]:
    """Send requests of two rows until the ``with`` block ends; the server rejects one request in ten."""
    stop = threading.Event()

    def ask() -> None:
        with triton.InferenceServerClient(target) as client:
            at = 0
            while not stop.wait(0.005):
                at += 1
                x = np.ones((2, 15 if at % 10 == 0 else 16), np.float32)
                tensor = triton.InferInput("x", list(x.shape), "FP32")
                tensor.set_data_from_numpy(x)
                try:
                    client.infer("mlp", [tensor])
                except triton.InferenceServerException as error:
                    assert error.status() == "StatusCode.INVALID_ARGUMENT"  # noqa: PT017 -- every tenth

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.long  # the page's history has a point every ten seconds
def test_the_page_shows_the_numbers_of_a_model_under_load(tmp_path: Path, serve: Serve) -> None:
    repository = tmp_path / "repository"
    write_mlp(repository / "mlp" / "1")
    write_mlp(repository / "spoilt" / "1", spoil=0.5)
    (repository / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000}\n")
    server = serve("--repository", str(repository))

    def seen() -> Any:
        return {model["name"]: model for model in json.loads(server.get("/status.json")[1])["models"]}

    until(lambda: all(model["state"] != "loading" for model in seen().values()), what="both models")
    with asking(server.target):
        until(lambda: len(seen()["mlp"]["recent"]["trend"]["drift"]) >= 1, 60, "a tick of the history")
        until(lambda: seen()["mlp"]["recent"]["counts"]["samples"].get("measured", 0) > 20, what="samples of drift")
        until(lambda: seen()["mlp"]["recent"]["drift"]["effective_samples"].get("y", 0) > 8, what="recent drift")
    recent = seen()["mlp"]["recent"]
    total = recent["total"]
    answered = total["codes"]["OK"]
    assert answered > 20
    assert 0.05 < total["codes"]["INVALID_ARGUMENT"] / answered < 0.15
    assert total["rows"] == 2 * answered
    assert recent["request"]["count"] == answered, "requests that failed are not timed"
    assert 0 < recent["request"]["p50"] <= recent["request"]["p90"] <= recent["request"]["p99"]
    assert 0 < recent["ratios"]["y"]["relative_l2"] < 1
    drift = recent["drift"]
    assert (drift["reference_up"], drift["gate_passed"], drift["over"], drift["fallback"]) == (True, True, False, False)
    assert drift["effective_samples"]["y"] <= recent["counts"]["samples"]["measured"]
    assert drift["low"]["y"]["relative_l2"] <= recent["ratios"]["y"]["relative_l2"]
    assert 0 <= server_time(server) - drift["last_sample"] < 60
    assert drift["answers"]["bf16"] == answered
    rates = recent["trend"]["requests_per_second"]
    assert max(rates) > 0
    assert recent["in_flight"] == recent["queue_depth"] == 0

    page = server.get("/")[1]
    assert "Not ready: 1 of 2 models does not answer" in page
    assert "golden samples are over the drift budget" in page
    assert "fp32: measured on this device when the model was loaded" in page
    assert "<code>OK</code></th>" in page
    for words in (
        "<dt>Reference</dt><dd>up; last sample <time",
        "<dt>Golden gate</dt><dd>passed at <time",
        ">bf16</dd>",
    ):
        assert words in page
    _look(server.ports()[1], tmp_path)


def server_time(server: ServerProcess) -> float:
    """Return the Unix seconds that the status page has."""
    return float(json.loads(server.get("/status.json")[1])["at_seconds"])


def _look(port: int, where: Path) -> None:
    binary = browser.find()
    if binary is None:
        pytest.skip("the rest needs Chromium on PATH (Debian: apt-get install chromium)")
    with Browser(binary, where / "profile") as chromium:
        for width in (360, 1280):
            chromium.emulate_display("light", width)
            for path in ("/", "/watch"):
                seen = chromium.open(f"http://127.0.0.1:{port}{path}")
                assert (seen.requests, seen.complaints) == ([], [])
                assert chromium.evaluate("document.documentElement.scrollWidth") == width
        assert chromium.evaluate("document.querySelectorAll('#m0 svg.spark').length") == 4
        said = "document.querySelector('#m0 h3').textContent"
        assert chromium.evaluate(said) in ("Drift within budget", "Drift not known yet")
        assert chromium.evaluate("document.querySelector('#m0 svg.spark').getBoundingClientRect().width") > 100
