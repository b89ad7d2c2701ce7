"""A damaged model: fp32 serves while its drift is over budget, and bf16 again once a healthy copy is loaded."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_damaged, write_mlp
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import until
from workerprocesses import Client, pids

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.metrics import compare
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime import Array
from bf16kit.runtime.loading import load, load_reference

X = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
SERVING = """
shadow: {rate: 1.0, max_per_second: 1000}
fallback: {policy: fp32, min_stay_seconds: %s, clean_samples: 20}
"""


class Asking:
    """Sends requests from one new client after another until the block ends; every request must succeed."""

    def __init__(self, server: ServerProcess, x: Array = X) -> None:
        self.x = x
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.failed: list[BaseException] = []
        self.answers: list[tuple[str, Array]] = []

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        assert self.failed == []

    def _work(self) -> None:
        try:
            while not self._over.is_set():
                client = Client(self._server.target)
                with client.channel:
                    for _ in range(5):
                        self.answers.append(answer(client, self.x))
        except BaseException as error:  # noqa: BLE001 - __exit__ asserts that there is none
            self.failed.append(error)

    @property
    def newest(self) -> set[str]:
        """Return the precisions of the last 40 responses, which come from several connections."""
        return {precision for precision, _ in self.answers[-40:]}


def answer(client: Client, x: Array) -> tuple[str, Array]:
    """Return the precision that the response states, and the output."""
    response: pb.ModelInferResponse = client.call("ModelInfer", infer_request("mlp", x=x), timeout=120)
    output = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(2, 16)
    return response.parameters["precision"].string_param, output


def serving(repository: Path, stay: float) -> None:
    (repository / "mlp").mkdir(exist_ok=True)
    (repository / "mlp" / "serving.yaml").write_text(SERVING % stay, "utf-8")


@pytest.mark.long
def test_fp32_serves_for_a_damaged_model_until_a_healthy_copy_is_loaded(tmp_path: Path, serve: Serve) -> None:
    serving(tmp_path, 600)
    damaged = write_damaged(tmp_path / "mlp" / "1")
    expected = load_reference(Artifact.open(damaged.path), threads=1).run({"x": X})["y"]
    environment = {**os.environ, "BF16KIT_POLL_SECONDS": "1"}
    server = serve("--repository", str(tmp_path), "--model-control", "poll", env=environment).wait_ready()
    client = Client(server.target)
    with Asking(server) as asking:
        until(lambda: asking.newest == {"fp32"}, 60, "fp32 answers")
        assert server.metric('bf16kit_fallback_active{model="mlp",version="1"}') == 1
        assert server.metric('bf16kit_fallback_transitions_total{model="mlp",to="fp32",version="1"}') == 1
        assert server.metric('bf16kit_answers_total{model="mlp",precision="fp32",version="1"}') > 0
        properties = client.call("ModelMetadata", pb.ModelMetadataRequest(name="mlp")).properties
        assert properties["active_precision"] == "fp32"
        assert "times its budget" in properties["active_precision_reason"]
        assert "times its budget" in server.get("/status.json")[1]
        assert server.log.count("is over its drift budget") == 1
        measured = 'bf16kit_drift_samples_total{model="mlp",outcome="measured",version="1"}'
        before = server.metric(measured)
        until(lambda: server.metric(measured) > before + 20, 60, "bf16 measured on, beside fp32")
        over = 'bf16kit_drift_over_budget{model="mlp",version="1"}'
        until(lambda: server.metric(over) == 1, 60, "over its budget, as measured since then")
        sound = write_mlp(tmp_path / "mlp" / "2")
        (tmp_path / "mlp" / "1").rename(tmp_path / "old")
        (tmp_path / "mlp" / "2").rename(tmp_path / "mlp" / "1")
        until(lambda: asking.newest == {"bf16"}, 60, "bf16 answers again")
    client.channel.close()
    by_bf16 = [y for precision, y in asking.answers if precision == "bf16"]
    np.testing.assert_allclose(by_bf16[0], expected * 1.05, rtol=2e-2, atol=1e-2)
    np.testing.assert_allclose(by_bf16[-1], expected, rtol=2e-2, atol=1e-2)
    for y in (y for precision, y in asking.answers if precision == "fp32"):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert sound.manifest.golden
    assert server.metric('bf16kit_fallback_active{model="mlp",version="1"}') == 0
    server.terminate()
    assert server.exit_code() == 0


def overflowing(artifact: Artifact) -> Array:
    """Return inputs near the largest number, on which fp32 overflows, and bf16 in other elements."""
    reference, bf16 = load_reference(artifact, threads=1), load(artifact, "cpu", threads=1)
    spec, random = TensorSpec("y", "float32", ("batch", 16)), np.random.default_rng(0)
    while True:
        x = (3e38 * random.uniform(-1, 1, (2, 16))).astype(np.float32)
        expected = reference.run({"x": x})["y"]
        if any(row.nonfinite for row in compare(expected, bf16.run({"x": x})["y"], spec, 0).rows):
            assert not np.isfinite(expected).all()
            return x


@pytest.mark.long
@pytest.mark.parametrize("beside", [True, False])
def test_a_client_whose_inputs_overflow_in_fp32_does_not_switch_the_others(
    tmp_path: Path, serve: Serve, beside: bool
) -> None:
    """The artifact has no calibrated ranges, and the client is alone or beside another one."""
    serving(tmp_path, 600)
    x = overflowing(write_mlp(tmp_path / "mlp" / "1"))
    server = serve("--repository", str(tmp_path)).wait_ready()
    left_out = 'bf16kit_drift_reference_nonfinite_total{model="mlp",version="1"}'
    measured = 'bf16kit_drift_samples_total{model="mlp",outcome="measured",version="1"}'
    hostile, honest = Client(server.target), Client(server.target)
    with hostile.channel, honest.channel:

        def enough() -> bool:
            for _ in range(20):
                assert answer(hostile, x)[0] == "bf16"
                assert not beside or answer(honest, X)[0] == "bf16"
            return server.metric(left_out) >= 400 and server.metric(measured) >= 200 * beside

        until(enough, 60, "four hundred rows left out")
        assert server.metric('bf16kit_drift_over_budget{model="mlp",version="1"}') == 0
        assert server.metric('bf16kit_fallback_active{model="mlp",version="1"}') == 0
        assert answer(honest, X)[0] == "bf16"
    assert "is over its drift budget" not in server.log


@pytest.mark.long
def test_one_connection_of_several_does_not_switch_the_others_and_a_wrong_model_does(
    tmp_path: Path, serve: Serve
) -> None:
    """bf16 is wrong for some inputs only. Only one connection sends them at first, then both do."""
    serving(tmp_path, 600)
    write_damaged(tmp_path / "mlp" / "1", above=50.0)
    server = serve("--repository", str(tmp_path)).wait_ready()
    measured = 'bf16kit_drift_samples_total{model="mlp",outcome="measured",version="1"}'
    wrong = X.copy()
    wrong[:, 0] = 100.0
    one, other = Client(server.target), Client(server.target)
    with one.channel, other.channel:

        def enough() -> bool:
            for _ in range(20):
                assert answer(other, X)[0] == "bf16"
                assert answer(one, wrong)[0] == "bf16"
            return server.metric(measured) >= 400

        until(enough, 60, "four hundred rows measured")
        ratio = 'bf16kit_drift_budget_ratio{metric="relative_l2",model="mlp",output="y",version="1"}'
        assert server.metric(ratio) > 1
        assert server.metric('bf16kit_drift_over_budget{model="mlp",version="1"}') == 0
        until(lambda: {answer(each, wrong)[0] for each in (one, other)} == {"fp32"}, 60, "fp32 answers")


@pytest.mark.long
def test_bf16_serves_again_once_its_drift_is_clearly_within_budget(tmp_path: Path, serve: Serve) -> None:
    """bf16 is wrong for some inputs only. Once clients stop sending them, the server returns to bf16 by itself."""
    serving(tmp_path, 0)
    write_damaged(tmp_path / "mlp" / "1", above=50.0)
    server = serve("--repository", str(tmp_path)).wait_ready()
    wrong = X.copy()
    wrong[:, 0] = 100.0
    with Asking(server, wrong) as asking:
        until(lambda: asking.newest == {"fp32"}, 60, "fp32 answers")
        asking.x = X
        until(lambda: asking.newest == {"bf16"}, 60, "bf16 answers again")
    assert server.metric('bf16kit_fallback_active{model="mlp",version="1"}') == 0
    assert server.metric('bf16kit_fallback_transitions_total{model="mlp",to="fp32",version="1"}') == 1
    assert server.metric('bf16kit_fallback_transitions_total{model="mlp",to="bf16",version="1"}') == 1
    assert "bf16 answers again" in server.log
    server.terminate()
    assert server.exit_code() == 0


@pytest.mark.long
def test_all_workers_serve_fp32_and_so_does_a_restarted_one(tmp_path: Path, serve: Serve) -> None:
    serving(tmp_path, 600)
    write_damaged(tmp_path / "mlp" / "1")
    server = serve("--repository", str(tmp_path), "--workers", "2").wait_ready()
    with Asking(server) as asking:
        until(lambda: asking.newest == {"fp32"}, 60, "fp32 answers, whoever is asked")
    transitions = 'bf16kit_fallback_transitions_total{model="mlp",to="fp32",version="1"}'
    assert server.metric(transitions) == 1, "once, not by each"
    before = pids(server)
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(pids(server)) == 2 and before[0] not in pids(server), 60, "another in its place")
    server.wait_ready()
    until(lambda: server.log.count("the fp32 reference is warm") == 3, 60, "warm in that one too")
    with Asking(server) as asking:
        until(lambda: len(asking.answers) >= 100, 60, "answers of both")
    assert asking.newest == {"fp32"}
    assert server.metric(transitions) == 1
    client = Client(server.target)
    with client.channel:
        properties = client.call("ModelMetadata", pb.ModelMetadataRequest(name="mlp")).properties
    assert properties["active_precision"] == "fp32"
    server.terminate()
    assert server.exit_code() == 0


@pytest.mark.long
def test_policy_alert_reports_the_breach_and_bf16_keeps_serving(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "mlp").mkdir()
    (tmp_path / "mlp" / "serving.yaml").write_text("shadow: {rate: 1.0, max_per_second: 1000}\n", "utf-8")
    write_damaged(tmp_path / "mlp" / "1")
    server = serve("--repository", str(tmp_path)).wait_ready()
    with Asking(server) as asking:
        until(lambda: "is over its drift budget: " in server.log, 60, "said")
        until(lambda: "times its budget" in server.get("/status.json")[1], 60, "on the page")
    assert {precision for precision, _ in asking.answers} == {"bf16"}
    server.terminate()
    assert server.exit_code() == 0


@pytest.mark.long
def test_a_version_stays_in_fallback_while_another_is_loaded_and_unloaded(tmp_path: Path, serve: Serve) -> None:
    """A worker that is restarted meanwhile serves fp32 too."""
    serving(tmp_path, 600)
    with (tmp_path / "mlp" / "serving.yaml").open("a", encoding="utf-8") as file:
        file.write("version_policy: all\n")
    write_damaged(tmp_path / "mlp" / "1")
    environment = {**os.environ, "BF16KIT_POLL_SECONDS": "1"}
    options = ("--repository", str(tmp_path), "--model-control", "poll", "--workers", "2")
    server = serve(*options, env=environment).wait_ready()
    active = 'bf16kit_fallback_active{model="mlp",version="1"}'
    with Asking(server) as asking:
        until(lambda: asking.newest == {"fp32"}, 60, "fp32 answers, whoever is asked")
    write_mlp(tmp_path / "new" / "2")
    (tmp_path / "new" / "2").rename(tmp_path / "mlp" / "2")
    until(lambda: server.metric('bf16kit_model_ready{model="mlp",version="2"}') == 1, 60, "another version")
    (tmp_path / "mlp" / "2").rename(tmp_path / "gone")
    until(lambda: server.metric('bf16kit_model_ready{model="mlp",version="2"}') == -1, 60, "and none")
    assert server.metric(active) == 1
    before = pids(server)
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(pids(server)) == 2 and before[0] not in pids(server), 60, "another worker in its place")
    server.wait_ready()
    until(lambda: server.log.count("the fp32 reference is warm") == 3, 60, "warm in that one too")
    with Asking(server) as asking:
        until(lambda: len(asking.answers) > 60, 60, "answers")
        assert {precision for precision, _ in asking.answers} == {"fp32"}
    assert server.metric('bf16kit_fallback_transitions_total{model="mlp",to="fp32",version="1"}') == 1
