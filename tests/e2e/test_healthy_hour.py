"""An hour of healthy traffic through a real server: a measured request every two seconds, sent as fast as they can be.

In the hour are a burst, a minute of overload, a rollout and a restart. No counter and no decision of the server depends
on the time between samples, so for the server an hour passes. For Prometheus too: promtool, whose clock can be
simulated where Prometheus' own cannot, gets the metrics that the server had at the end of each of those minutes, and
evaluates the rules on them.
"""

import shutil
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import faultymodels
import grpc
import pytest
from faultymodels import rows
from loopback import infer_request
from manyreplicas import PROMTOOL, firing, promtool
from prometheus_client.parser import text_string_to_metric_families
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client

pytestmark = pytest.mark.long
MINUTES, A_MINUTE = 60, 30  # requests of one row, each of which is measured
AT_ONCE = 10  # there is room for 16 in the queue
BURST, OVERLOAD, ROLLOUT, RESTART = 12, 22, 32, 46  # minutes
SERVING = """
shadow: {rate: 1, max_per_second: 100000}
fallback: {policy: fp32}
golden_seconds: 5
max_queue_delay_ms: 10
max_queue_size: 16
"""
SAMPLES = "bf16kit_drift_samples_total"
_seeds = count(50_000)
Told = dict[str, list[str]]  # series (name and labels) -> its value at each minute; "_": no value


def samples(server: ServerProcess, start: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the series whose lines start so: it takes much longer to parse all of them."""
    lines = [line for line in server.get("/metrics")[1].splitlines() if line.startswith(start)]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value


def value(server: ServerProcess, name: str, **labels: str) -> float:
    """Return the sum of the series of this name that have these labels; 0 if there is none."""
    return sum(v for found, has, v in samples(server, name) if found == name and labels.items() <= has.items())


def series(name: str, labels: dict[str, str]) -> str:
    listed = ", ".join(f'{key}="{text}"' for key, text in {**labels, "job": "bf16kit", "instance": "a:8002"}.items())
    return f"{name}{{{listed}}}"


class Hour:
    """The hour of one repository's server. ``told`` is what Prometheus would have scraped at the end of each minute."""

    def __init__(self, serve: Serve, repository: Path, sound: Path) -> None:
        self._serve, self._repository, self._sound = serve, repository, sound
        self.servers: list[ServerProcess] = []
        self._start()
        self.told: Told = defaultdict(lambda: ["_"] * (MINUTES + 1))
        self.rejected = 0

    @property
    def server(self) -> ServerProcess:
        return self.servers[-1]

    def _start(self) -> None:
        options = ("--repository", self._repository, "--model-control", "poll")
        self.servers.append(self._serve(*options, env={"BF16KIT_POLL_SECONDS": "1"}).wait_ready())

    def pass_by(self) -> None:
        """Send the requests of every minute."""
        for minute in range(MINUTES + 1):
            if minute == ROLLOUT:
                shutil.copytree(self._sound, self._repository / "sound" / "2")
                until(lambda: value(self.server, "bf16kit_model_ready", version="1") == 0, 60, "version 1's end")
            if minute == RESTART:
                self.server.close()
                self._start()
            for name, labels, found in samples(self.server, ""):
                self.told[series(name, labels)][minute] = repr(found).replace("inf", "Inf").replace("nan", "NaN")
            self.told[series("up", {})][minute] = "1"
            if minute < MINUTES:
                self._send(10 * A_MINUTE if minute == BURST else A_MINUTE)
            while minute == OVERLOAD and self.rejected < A_MINUTE:
                self.rejected += self._send(60, at_once=60)

    def _send(self, requests: int, at_once: int = AT_ONCE) -> int:
        """Send the requests, and wait until those that are answered are measured. Returns how many are rejected."""
        rejected = 0
        with Client(self.server.target) as client:
            for _ in range(0, requests, at_once):
                before = value(self.server, SAMPLES, outcome="measured")
                calls = [
                    client.ask("ModelInfer").future(infer_request("sound", x=rows(1, next(_seeds))), timeout=60)
                    for _ in range(at_once)
                ]
                codes = [call.code() for call in calls]
                assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
                answered = codes.count(grpc.StatusCode.OK)
                rejected += at_once - answered
                until(lambda due=before + answered: value(self.server, SAMPLES, outcome="measured") == due, 90)  # type: ignore[misc]
        return rejected


def fired(told: Told, scratch: Path) -> str:
    """Return promtool's output if any alert fires at any minute; empty if none does."""
    return promtool(scratch, told, *(firing(minute) for minute in range(MINUTES + 1)))


def test_an_hour_with_a_burst_overload_a_rollout_and_a_restart_fires_no_alert(tmp_path: Path, serve: Serve) -> None:
    repository = tmp_path / "repository"
    sound = faultymodels.convert(repository, "sound", tmp_path / "source")
    (repository / "sound" / "serving.yaml").write_text(SERVING, "utf-8")
    hour = Hour(serve, repository, sound)
    hour.pass_by()
    server = hour.server
    assert hour.rejected >= A_MINUTE
    assert value(server, SAMPLES) == (MINUTES - RESTART) * A_MINUTE, "all of them, none dropped or failed"
    assert value(server, "bf16kit_model_ready", version="2") == 1
    for name in ("changes_total", "over_budget", "cause", "nonfinite_total", "out_of_range_total"):
        assert value(server, f"bf16kit_drift_{name}") == 0, name
    assert value(server, "bf16kit_drift_change_score") < 2, "of two outputs, each below its threshold"
    assert value(server, "bf16kit_fallback_transitions_total") == 0
    assert value(server, "bf16kit_answers_total", precision="fp32") == 0
    assert value(server, "bf16kit_golden_gate_passed") == 1
    assert [line for each in hour.servers for line in each.lines if "WARNING" in line or "ERROR" in line] == []
    if not PROMTOOL:
        pytest.skip("no promtool on PATH (Debian: apt-get install prometheus)")
    assert fired(hour.told, tmp_path) == ""
    over = {**hour.told, series("bf16kit_drift_over_budget", {"model": "sound", "version": "1"}): ["1"] * (MINUTES + 1)}
    assert "Bf16DriftOverBudget" in fired(over, tmp_path), "it would have been seen"
