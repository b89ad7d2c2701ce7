"""``compose.yaml`` brought up for real: convert, serve, scrape; then asked from outside, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minilm
import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml
from numpy.typing import NDArray
from sentences import sentences

from bf16kit.runtime.kernel import PATHS

pytestmark = pytest.mark.compose
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Stack:
    """A compose project of its own: its name, and its ports on free ones of this machine."""

    project: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``docker compose …`` for this project."""
        ports = {"GRPC_PORT": "0", "HTTP_PORT": "0", "PROMETHEUS_PORT": "0"}
        command = ["docker", "compose", "--project-name", self.project, "--progress", "quiet", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env={**os.environ, **ports}, capture_output=True, text=True, check=False
        )

    def compose(self, *arguments: str) -> str:
        """The standard output of ``docker compose …``; the test fails, with what it wrote, when it does."""
        done = self.run(*arguments)
        if done.returncode != 0:
            pytest.fail(
                f"compose {arguments} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        return done.stdout.strip()

    def address(self, service: str, port: int) -> str:
        return self.compose("port", service, str(port))

    def ask(self, path: str, **parameters: str) -> Any:
        """What the HTTP API of the stack's Prometheus answers."""
        url = f"http://{self.address('prometheus', 9090)}/api/v1/{path}?" + urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, promql: str) -> list[float]:
        """The values of an instant query, one per series."""
        return [float(series["value"][1]) for series in self.ask("query", query=promql)["result"]]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The whole stack, up and healthy; taken down with its volumes, whatever happened."""
    if subprocess.run(["docker", "compose", "ls"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker engine with the compose plugin answers here")
    stack = Stack(f"bf16kit-test-{uuid.uuid4().hex[:8]}")
    try:
        stack.compose("build")
        # `up` returns when what everything depends on has happened: converted, then ready.
        if stack.run("up", "--detach").returncode != 0:
            pytest.fail(f"the stack did not come up:\n{stack.compose('logs', '--no-color')[-6000:]}")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout", "10")
    assert not stack.compose("ps", "--all", "--quiet")


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(stack.address("server", 8001)) as client:
        yield client


def embed(client: triton.InferenceServerClient, text: str) -> NDArray[np.float64]:
    """The sentence embedding [384] of ``text``, pooled here as any client would."""
    feeds = minilm.tokenize(minilm.tokenizer(), [text])
    tensors = []
    for tensor in client.get_model_metadata("minilm").inputs:
        tensors.append(triton.InferInput(tensor.name, list(feeds[tensor.name].shape), tensor.datatype))
        tensors[-1].set_data_from_numpy(feeds[tensor.name])
    reply = client.infer("minilm", tensors)
    return np.asarray(minilm.mean_pool(reply.as_numpy("last_hidden_state"), feeds["attention_mask"])[0])


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Until ``condition`` holds; the test fails when it does not within ``seconds``."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain"
        pause.wait(0.2)


def test_an_unmodified_client_outside_gets_meaningful_answers(client: triton.InferenceServerClient) -> None:
    eating, meal, concert = (
        embed(client, text)
        for text in (
            "A man is eating a piece of bread.",
            "Someone is having a meal.",
            "There is a concert in the city this evening.",
        )
    )
    assert eating @ meal > 0.4 > eating @ concert


def test_the_image_has_the_cpu_kernel_and_the_model_runs_on_it(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("minilm").config
    assert config.parameters["kernel"].string_value in PATHS


def test_live_drift_of_real_sentences_is_read_back_through_promql(
    stack: Stack, client: triton.InferenceServerClient
) -> None:
    measured = 'sum(bf16kit_drift_samples_total{model="minilm", outcome="measured"})'

    def enough_after_another_round() -> bool:
        """The shadow drops what it has no time for, so a round of sentences may not be enough."""
        for sentence in sentences(20):
            embed(client, sentence)
        return sum(stack.query(measured)) >= 20

    wait_for(enough_after_another_round, seconds=120)
    total, count = (f'bf16kit_drift_relative_l2_{part}{{output="last_hidden_state"}}' for part in ("sum", "count"))
    (drift,) = stack.query(f"{total} / {count}")
    assert 0 < drift < 1.5e-2
    ratios = stack.query('bf16kit_drift_budget_ratio{model="minilm"}')
    assert ratios
    assert max(ratios) < 1


def test_prometheus_has_the_rules_and_none_of_them_fires_on_a_healthy_stack(stack: Stack) -> None:
    written = [
        rule.get("alert") or rule["record"]
        for path in (ROOT / "deploy" / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
        for rule in group["rules"]
    ]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in stack.ask("rules")["groups"] for rule in group["rules"]]

    wait_for(lambda: {rule["health"] for rule in rules()} == {"ok"}, seconds=60)
    assert sorted(rule["name"] for rule in rules()) == sorted(written)
    assert [alert for alert in stack.ask("alerts")["alerts"] if alert["state"] == "firing"] == []


def test_the_server_runs_without_privileges_on_a_file_system_it_cannot_write(stack: Stack) -> None:
    script = "import os; print(os.getuid(), os.access('/', os.W_OK), os.access('/models', os.W_OK))"
    assert stack.compose("exec", "-T", "server", "python", "-c", script) == "10001 False False"


def test_the_server_image_holds_no_torch(stack: Stack) -> None:
    script = "from importlib.util import find_spec; print(find_spec('torch'), find_spec('transformers'))"
    assert stack.compose("exec", "-T", "server", "python", "-c", script) == "None None"


def test_starting_again_keeps_the_artifact_that_is_there(stack: Stack) -> None:
    assert "is there already" in stack.compose("run", "--rm", "-T", "convert")


def test_the_server_ends_cleanly_when_asked_to(stack: Stack) -> None:
    """Last: SIGTERM drains and exits 0; 137 would mean that Docker lost patience."""
    stack.compose("stop", "server")
    state = stack.compose("ps", "--all", "--format", "{{.ExitCode}}", "server")
    assert state == "0"
