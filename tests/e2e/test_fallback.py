"""A damaged model: fp32 serves while its drift is over budget, and bf16 again once a healthy copy is loaded."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_damaged, write_mlp
from loopback import infer_request
from serverprocess import Serve, ServerProcess
from waiting import repeating
from waiting import until as until_within
from workerprocesses import Client, pids, wait_replaced

from bf16kit.artifact.artifact import Artifact
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime import Array
from bf16kit.runtime.loading import load_reference

pytestmark = pytest.mark.long  # waits for samples of drift

X = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)
WRONG = X.copy()  # bf16 is wrong for it if the artifact is damaged above 50
WRONG[:, 0] = 100.0
POLLING = {"BF16KIT_POLL_SECONDS": "1", "BF16KIT_MODEL_CONTROL": "poll"}


def until(condition: Callable[[], object], what: str) -> None:
    until_within(condition, 60, what)


def configure(repository: Path, *, policy: str = "fp32", stay: float = 600, more: str = "") -> None:
    (repository / "mlp").mkdir(exist_ok=True)
    fallback = f"fallback: {{policy: {policy}, min_stay_seconds: {stay}, clean_samples: 20}}\n"
    (repository / "mlp" / "serving.yaml").write_text(f"shadow: {{rate: 1, max_per_second: 1000}}\n{fallback}{more}")


def answer(client: Client, x: Array) -> tuple[str, Array]:
    """Return the precision that the response states, and the output."""
    response: pb.ModelInferResponse = client.call("ModelInfer", infer_request("mlp", x=x), timeout=120)
    output = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(2, 16)
    return response.parameters["precision"].string_param, output


def properties(server: ServerProcess) -> dict[str, str]:
    with Client(server.target) as client:
        return dict(client.call("ModelMetadata", pb.ModelMetadataRequest(name="mlp")).properties)


def transitions(server: ServerProcess, to: str = "fp32") -> float:
    return server.of_model("fallback_transitions_total", to=to)


def measured(server: ServerProcess) -> float:
    return server.of_model("drift_samples_total", outcome="measured")


class Asking:
    """Answers to requests from one new client after another. ``x`` may be changed meanwhile."""

    def __init__(self, server: ServerProcess, x: Array) -> None:
        self.x = x
        self.answers: list[tuple[str, Array]] = []
        self._server = server

    def ask(self) -> None:
        with Client(self._server.target) as client:
            for _ in range(5):
                self.answers.append(answer(client, self.x))

    def until_all_are(self, precision: str) -> None:
        """Wait until the last 40 responses, which come from several connections, have this precision."""
        until(lambda: {each for each, _ in self.answers[-40:]} == {precision}, f"{precision} answers")


@contextmanager
def asking(server: ServerProcess, x: Array = X) -> Iterator[Asking]:
    """Send requests until the block ends; every one must succeed."""
    with repeating((made := Asking(server, x)).ask):
        yield made


def test_fp32_serves_for_a_damaged_model_until_a_healthy_copy_is_loaded(tmp_path: Path, serve: Serve) -> None:
    configure(tmp_path)
    damaged = write_damaged(tmp_path / "mlp" / "1")
    expected = load_reference(Artifact.open(damaged.path), threads=1).run({"x": X})["y"]
    server = serve("--repository", tmp_path, env=POLLING).wait_ready()
    with asking(server) as asked:
        asked.until_all_are("fp32")
        assert (server.of_model("fallback_active"), transitions(server)) == (1, 1)
        assert server.of_model("answers_total", precision="fp32") > 0
        assert properties(server)["active_precision"] == "fp32"
        assert "times its budget" in properties(server)["active_precision_reason"]
        assert "times its budget" in server.get("/status.json")[1]
        assert server.log.count("is over its drift budget") == 1
        before = measured(server)
        until(lambda: measured(server) > before + 20, "bf16 measured on, beside fp32")
        until(lambda: server.of_model("drift_over_budget") == 1, "over its budget, as measured since then")
        write_mlp(tmp_path / "mlp" / "2")
        (tmp_path / "mlp" / "1").rename(tmp_path / "old")
        (tmp_path / "mlp" / "2").rename(tmp_path / "mlp" / "1")
        asked.until_all_are("bf16")
    by_bf16 = [y for precision, y in asked.answers if precision == "bf16"]
    np.testing.assert_allclose(by_bf16[0], expected * 1.05, rtol=2e-2, atol=1e-2)
    np.testing.assert_allclose(by_bf16[-1], expected, rtol=2e-2, atol=1e-2)
    for y in (y for precision, y in asked.answers if precision == "fp32"):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert server.of_model("fallback_active") == 0
    server.stop()


def test_one_connection_of_several_does_not_switch_the_others_and_a_wrong_model_does(
    tmp_path: Path, serve: Serve
) -> None:
    """Only one connection sends at first the inputs for which bf16 is wrong, then both do."""
    configure(tmp_path)
    write_damaged(tmp_path / "mlp" / "1", above=50.0)
    server = serve("--repository", tmp_path).wait_ready()
    with Client(server.target) as one, Client(server.target) as other:

        def enough() -> bool:
            for _ in range(20):
                assert answer(other, X)[0] == "bf16"
                assert answer(one, WRONG)[0] == "bf16"
            return measured(server) >= 400

        until(enough, "four hundred rows measured")
        assert server.of_model("drift_budget_ratio", metric="relative_l2", output="y") > 1
        assert server.of_model("drift_over_budget") == 0
        until(lambda: {answer(each, WRONG)[0] for each in (one, other)} == {"fp32"}, "fp32 answers")


def test_bf16_serves_again_once_its_drift_is_clearly_within_budget(tmp_path: Path, serve: Serve) -> None:
    """Once clients stop sending what bf16 is wrong for, the server returns to bf16 by itself."""
    configure(tmp_path, stay=0)
    write_damaged(tmp_path / "mlp" / "1", above=50.0)
    server = serve("--repository", tmp_path).wait_ready()
    with asking(server, WRONG) as asked:
        asked.until_all_are("fp32")
        asked.x = X
        asked.until_all_are("bf16")
    assert server.of_model("fallback_active") == 0
    assert (transitions(server, "fp32"), transitions(server, "bf16")) == (1, 1)
    assert "bf16 answers again" in server.log


def test_all_workers_serve_fp32_and_so_does_a_restarted_one_after_another_version_came_and_went(
    tmp_path: Path, serve: Serve
) -> None:
    configure(tmp_path, more="version_policy: all\n")
    write_damaged(tmp_path / "mlp" / "1")
    server = serve("--repository", tmp_path, "--workers", "2", env=POLLING).wait_ready()
    with asking(server) as asked:
        asked.until_all_are("fp32")
    assert transitions(server) == 1, "once, not by each"
    write_mlp(tmp_path / "new" / "2")
    (tmp_path / "new" / "2").rename(tmp_path / "mlp" / "2")
    until(lambda: server.of_model("model_ready", version=2) == 1, "another version")
    (tmp_path / "mlp" / "2").rename(tmp_path / "gone")
    until(lambda: server.of_model("model_ready", version=2) == -1, "and none")
    assert server.of_model("fallback_active") == 1
    (victim, _) = pids(server)
    os.kill(victim, signal.SIGKILL)
    wait_replaced(server, victim)
    server.wait_ready()
    until(lambda: server.log.count("the fp32 reference is warm") == 3, "warm in that one too")
    with asking(server) as asked:
        until(lambda: len(asked.answers) >= 100, "answers of both")
    assert {precision for precision, _ in asked.answers} == {"fp32"}
    assert transitions(server) == 1
    assert properties(server)["active_precision"] == "fp32"
    server.stop()
