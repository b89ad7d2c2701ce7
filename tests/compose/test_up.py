"""``docker compose up`` converts, serves and scrapes; the tests then use the stack from outside, as a user would."""

import re
import subprocess
import sys
from typing import Any

import minilm
import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml
from composing import ROOT, Stack
from numpy.typing import NDArray
from sentences import sentences
from waiting import until

from bf16kit.runtime.ort.kernel import PATHS

pytestmark = pytest.mark.compose
_QUICKSTART = re.compile(r"^### Ask a served model$.*?^```python$\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def embed(client: triton.InferenceServerClient, text: str) -> NDArray[np.float64]:
    """Return the sentence embedding [384] of ``text``, pooled here as any client would."""
    feeds = minilm.tokenize(minilm.tokenizer(), [text])
    tensors = []
    for tensor in client.get_model_metadata("minilm").inputs:
        tensors.append(triton.InferInput(tensor.name, list(feeds[tensor.name].shape), tensor.datatype))
        tensors[-1].set_data_from_numpy(feeds[tensor.name])
    reply = client.infer("minilm", tensors)
    return np.asarray(minilm.mean_pool(reply.as_numpy("last_hidden_state"), feeds["attention_mask"])[0])


def test_the_readmes_client_works(stack: Stack) -> None:
    """The code runs as in the README; only the port is replaced."""
    found = _QUICKSTART.search((ROOT / "README.md").read_text("utf-8"))
    assert found is not None
    assert '"127.0.0.1:8001"' in found[1]
    program = found[1].replace("127.0.0.1:8001", stack.target)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("(1, 4, 384)", 0), done.stderr


def test_an_unmodified_client_gets_meaningful_embeddings(client: triton.InferenceServerClient) -> None:
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


def test_live_drift_of_real_sentences_is_available_through_promql(
    stack: Stack, client: triton.InferenceServerClient
) -> None:
    measured = 'sum(bf16kit_drift_samples_total{model="minilm", outcome="measured"})'

    def enough_after_another_round() -> bool:
        """The shadow drops samples that it has no time for, so one round of sentences may not be enough."""
        for sentence in sentences(20):
            embed(client, sentence)
        return sum(stack.query(measured)) >= 20

    until(enough_after_another_round, 120, "20 measured samples in Prometheus")
    total, count = (f'bf16kit_drift_relative_l2_{part}{{output="last_hidden_state"}}' for part in ("sum", "count"))
    (drift,) = stack.query(f"{total} / {count}")
    assert 0 < drift < 1.5e-2
    ratios = stack.query('bf16kit_drift_budget_ratio{model="minilm"}')
    assert ratios
    assert max(ratios) < 1


def test_prometheus_has_the_rules_and_no_alert_fires_on_a_healthy_stack(stack: Stack) -> None:
    written = [
        rule.get("alert") or rule["record"]
        for path in (ROOT / "deploy" / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
        for rule in group["rules"]
    ]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in stack.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: {rule["health"] for rule in rules()} == {"ok"}, 60, "an evaluation of each rule")
    assert sorted(rule["name"] for rule in rules()) == sorted(written)
    # Other tests may have restarted the server before this one, and on a busy machine the server is slow.
    assert stack.firing() <= {"Bf16ServerRestarting", "Bf16LatencyBudgetBurning"}


def test_the_server_knows_its_containers_memory(stack: Stack) -> None:
    """The server uses the container's limit, not the machine's memory."""
    limit = stack.container("server")["HostConfig"]["Memory"]
    assert f"of the {limit / 1e6:.0f} MB that this container may take" in stack.log("server")
