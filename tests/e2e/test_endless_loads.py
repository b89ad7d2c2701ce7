"""A model whose loading never ends holds up neither other models nor the end of the server, and the log names it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import impatient
import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp
from endless import write_endless_script, write_folding
from serverprocess import Serve, ServerProcess
from waiting import until

from bf16kit.artifact.artifact import Artifact

pytestmark = pytest.mark.long
# The real limits allow for half an hour, and for 10 s before another model is loaded beside.
Write = Callable[[Path], Artifact]
FOLDING = "creating the session of cpu.onnx"
RUNNING = "running model.torchscript.pt for the first time"
Impatient = Callable[..., ServerProcess]


@pytest.fixture
def serve_impatiently(serve: Serve) -> Impatient:
    """Return a function that serves a repository with short limits."""

    def start(repository: Path, *arguments: str, run_seconds: float = 300.0) -> ServerProcess:
        env = {"STEP_SECONDS": "600", "FIRST_RUN_SECONDS": str(run_seconds)}
        flags = ("--repository", repository, "--device", "cpu", *arguments)
        return serve(*flags, env=env, program=Path(impatient.__file__))

    return start


def put(root: Path, name: str, write: Write) -> None:
    write(root / name / "1")
    (root / name / "serving.yaml").write_text("shadow: {rate: 0}\n")


def ends_in_time(server: ServerProcess) -> bool:
    begun = time.monotonic()
    server.terminate()
    return server.exit_code() == 0 and time.monotonic() - begun < 25  # the default of drain_seconds


def test_others_load_beside_a_load_that_does_not_end_and_the_server_stops_meanwhile(
    tmp_path: Path, serve_impatiently: Impatient
) -> None:
    put(tmp_path, "a-endless", write_folding)
    put(tmp_path, "b-good", write_mlp)
    put(tmp_path, "c-good", write_mlp)
    server = serve_impatiently(tmp_path)
    until(
        lambda: server.of_model("model_ready", "b-good") == 1 and server.of_model("model_ready", "c-good") == 1,
        60,
        "the others",
    )
    slow = re.compile(rf"model 'a-endless' version 1 has been loading for \d+ s: {re.escape(FOLDING)}\n")
    until(lambda: slow.search(server.log), 60, "the log")
    assert server.of_model("model_ready", "a-endless") != 1
    assert ends_in_time(server)


def test_a_load_that_does_not_end_is_given_up_and_asking_for_it_says_why(
    tmp_path: Path, serve_impatiently: Impatient
) -> None:
    put(tmp_path, "endless", write_endless_script)
    put(tmp_path, "good", write_mlp)
    server = serve_impatiently(tmp_path, "--model-control", "explicit", run_seconds=1.0)
    with triton.InferenceServerClient(server.target) as client:
        with pytest.raises(triton.InferenceServerException, match="failed to load 'endless'") as refused:
            client.load_model("endless")
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
        until(lambda: "model 'endless' version 1 is unavailable: loading" in server.log)
        for text in (server.log, str(refused.value.message())):
            assert f"{RUNNING} took longer than 11 s" in text
        client.load_model("good")
        assert client.is_model_ready("good")
        client.unload_model("endless")
    assert ends_in_time(server)
