"""tritonclient loads, replaces and unloads models, while the models that are loaded continue to serve."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from controlled import HeldLoads, write_model
from inprocess import running
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.utils import InferenceServerException
from waiting import until

from bf16kit.service.config.loops import Stop
from bf16kit.service.models import loading
from bf16kit.service.models.engine import Engine

Serve = Callable[..., Client]
LAST = "shadow: {rate: 0}\n"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Yield a function that starts a server for ``tmp_path`` with the given configuration and returns a client."""
    with ExitStack() as stack:

        def start(stop: Stop | None = None, **keys: Any) -> Client:
            return stack.enter_context(Client(stack.enter_context(running(tmp_path, stop=stop, **keys))))

        yield start


@pytest.fixture
def client(serve: Serve) -> Client:
    return serve(model_control="explicit")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldLoads]:
    held = HeldLoads()
    monkeypatch.setattr(loading, "load", held)
    yield held
    held.go.set()


def put(root: Path, name: str = "mlp", version: int = 1, *, serving: str = LAST, **made: Any) -> Path:
    return write_model(root, name, version, serving=serving, **made)


def infer(client: Client, model: str = "mlp", version: str = "") -> str:
    """Send a request and return the version that responded."""
    x = InferInput("x", [1, 16], "FP32")
    x.set_data_from_numpy(np.ones((1, 16), np.float32))
    return str(client.infer(model, [x], model_version=version).get_response().model_version)


def index(client: Client) -> list[tuple[str, str, str]]:
    return [(line.name, line.version, line.state) for line in client.get_model_repository_index().models]


def reason(client: Client, name: str, version: str) -> str:
    lines = client.get_model_repository_index().models
    return next(str(line.reason) for line in lines if (line.name, line.version) == (name, version))


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as error:
        call()
    return str(error.value.status()).removeprefix("StatusCode."), str(error.value.message())


def waiting_loads(callers: ThreadPoolExecutor, client: Client, loads: HeldLoads) -> list[Future[None]]:
    """Return calls that wait: one for the load of ``first``, which is held, and three for that of ``mlp``."""
    loads.go.clear()
    first = callers.submit(client.load_model, "first")
    until(lambda: loads.begun == ["first/1"])
    same = [callers.submit(client.load_model, "mlp") for _ in range(3)]
    until(lambda: ("mlp", "1", "LOADING") in index(client))
    return [first, *same]


# --- load and unload --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_model_serves_when_its_load_returns_and_not_after_its_unload(tmp_path: Path, client: Client) -> None:
    """With explicit control a server starts ready, without models. To unload one that is not loaded changes nothing."""
    put(tmp_path)
    assert client.is_server_ready()
    assert {"model_repository", "model_repository(unload_dependents)"} <= set(client.get_server_metadata().extensions)
    for name in ("mlp", "nobody", "../mlp"):
        client.unload_model(name)
    assert index(client) == [("mlp", "", "")]
    assert refusal(lambda: infer(client))[0] == "NOT_FOUND"
    client.load_model("mlp")
    assert client.is_model_ready("mlp")
    assert infer(client) == "1"
    assert index(client) == [("mlp", "1", "READY")]
    client.unload_model("mlp", unload_dependents=True)
    assert not client.is_model_ready("mlp")
    assert refusal(lambda: infer(client))[0] == "NOT_FOUND"
    assert (index(client), reason(client, "mlp", "1")) == ([("mlp", "1", "UNAVAILABLE")], "unloaded")
    assert client.is_server_ready()
    client.load_model("mlp")
    assert infer(client) == "1"


@pytest.mark.long
def test_a_model_is_unloading_until_its_requests_in_flight_are_complete(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path)
    begun, go, run = threading.Event(), threading.Event(), Engine.run

    def held(engine: Engine, *given: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return run(engine, *given)

    monkeypatch.setattr(Engine, "run", held)
    client.load_model("mlp")
    with ThreadPoolExecutor(2) as others:
        try:
            asked = others.submit(infer, client)
            assert begun.wait(60)
            unloaded = others.submit(client.unload_model, "mlp")
            until(lambda: index(client) == [("mlp", "1", "UNLOADING")])
            assert refusal(lambda: infer(client))[0] == "NOT_FOUND"
            assert not unloaded.done()
        finally:
            go.set()
        assert asked.result(60) == "1"
        unloaded.result(60)
    assert index(client) == [("mlp", "1", "UNAVAILABLE")]


@pytest.mark.long
def test_concurrent_loads_and_unloads_end_as_the_last_request_says(
    tmp_path: Path, loads: HeldLoads, client: Client
) -> None:
    put(tmp_path)
    put(tmp_path, "first")
    with ThreadPoolExecutor(8) as callers:
        calls = waiting_loads(callers, client, loads)
        loads.go.set()
        for call in calls:
            call.result(60)
        assert loads.begun == ["first/1", "mlp/1"]
        for _ in range(10):
            both = [callers.submit(client.unload_model, "mlp"), callers.submit(client.load_model, "mlp")]
            ended = [call.exception(60) for call in both]
            refused = [error.status() for error in ended if isinstance(error, InferenceServerException)]
            assert len(refused) == len([error for error in ended if error])
            assert set(refused) <= {"StatusCode.UNAVAILABLE"}  # the other request came later and counts
    client.load_model("mlp")
    assert infer(client) == "1"
    assert infer(client, "first") == "1"


# --- models that cannot be loaded -------------------------------------------------------------------------------------


def damaged(target: Path) -> None:
    content = bytearray((target / "weights.bf16").read_bytes())
    content[0] ^= 1
    (target / "weights.bf16").write_bytes(content)


def wrongly_configured(target: Path) -> None:
    (target.parent / "serving.yaml").write_text("max_batch: 3")


@pytest.mark.long
@pytest.mark.parametrize(
    ("spoil", "words"),
    [(damaged, "weights.bf16"), (wrongly_configured, "unknown key 'max_batch'"), (None, "over the drift budget")],
)
@pytest.mark.parametrize("served", [True, False])
def test_a_failed_load_gives_the_reason_and_the_serving_model_continues(
    tmp_path: Path, client: Client, spoil: Callable[[Path], None] | None, words: str, served: bool
) -> None:
    if served:
        put(tmp_path)
        client.load_model("mlp")
    target = put(tmp_path, spoil=0.0 if spoil else 0.5)
    if spoil:
        spoil(target)
    code, text = refusal(lambda: client.load_model("mlp"))
    assert (code, words in text) == ("UNAVAILABLE", True), text
    assert text.startswith("failed to load 'mlp': ")
    assert words in reason(client, "mlp", "1")
    assert index(client) == [("mlp", "1", "READY" if served else "UNAVAILABLE")]
    assert client.is_model_ready("mlp") == served
    assert client.is_server_ready()
    if served:
        assert infer(client) == "1"
    put(tmp_path)
    client.load_model("mlp")
    assert (infer(client), reason(client, "mlp", "1")) == ("1", "")


def test_callers_that_wait_for_one_load_get_the_same_error(tmp_path: Path, loads: HeldLoads, client: Client) -> None:
    put(tmp_path, "first")
    put(tmp_path, spoil=0.5)
    with ThreadPoolExecutor(4) as callers:
        first, *waiting = waiting_loads(callers, client, loads)
        loads.go.set()
        first.result(60)
        texts = {refusal(lambda call=call: call.result(60)) for call in waiting}  # type: ignore[misc]
    ((code, text),) = texts
    assert (code, text.count("failed to load")) == ("UNAVAILABLE", 1)


@pytest.mark.parametrize("name", ["nobody", "", "..", "mlp/1", "../mlp"])
def test_a_model_that_the_repository_lacks_is_not_found(tmp_path: Path, client: Client, name: str) -> None:
    put(tmp_path)
    code, text = refusal(lambda: client.load_model(name))
    assert (code, text.startswith("failed to load ")) == ("NOT_FOUND", True)


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_deadline_ends_the_wait_and_not_the_load(tmp_path: Path, loads: HeldLoads, client: Client) -> None:
    put(tmp_path)
    loads.go.clear()
    code, text = refusal(lambda: client.load_model("mlp", client_timeout=1.0))
    assert code == "DEADLINE_EXCEEDED"
    assert "loading model 'mlp' takes longer than the call's deadline; it continues: see RepositoryIndex" in text
    assert index(client) == [("mlp", "1", "LOADING")]
    assert client.is_server_ready()
    loads.go.set()
    until(lambda: client.is_model_ready("mlp"))


def test_a_stop_does_not_wait_for_loads(tmp_path: Path, loads: HeldLoads, serve: Serve) -> None:
    put(tmp_path)
    stop = Stop()
    client = serve(stop, model_control="explicit", drain_seconds=50)
    loads.go.clear()
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(client.load_model, "mlp")
        until(lambda: loads.begun == ["mlp/1"])
        begun = time.monotonic()
        stop.set()
        code, text = refusal(lambda: call.result(60))
        assert (code, "shutting down" in text) == ("UNAVAILABLE", True), text
        assert time.monotonic() - begun < 25
        loads.go.set()


def test_callers_that_wait_for_loads_do_not_delay_probes(tmp_path: Path, loads: HeldLoads, client: Client) -> None:
    put(tmp_path)
    loads.go.clear()
    with ThreadPoolExecutor(200) as callers:
        calls = [callers.submit(client.load_model, "mlp", client_timeout=60) for _ in range(200)]
        until(lambda: sum(call.done() for call in calls) >= 100)  # rejected: too many calls wait already
        assert client.is_server_live()
        assert client.is_server_ready()
        loads.go.set()
        ended = [call.exception(60) for call in calls]
    refused = {str(error.status()) for error in ended if isinstance(error, InferenceServerException)}
    assert refused == {"StatusCode.RESOURCE_EXHAUSTED"}
    assert ended.count(None) >= 1


# --- parameters -------------------------------------------------------------------------------------------------------


def load(client: Client, config: Mapping[str, Any] | str) -> None:
    client.load_model("mlp", config=config if isinstance(config, str) else json.dumps(config))


@pytest.mark.long
def test_a_configuration_sent_with_a_load_applies_until_a_load_without_one(tmp_path: Path, client: Client) -> None:
    put(tmp_path, version=1)
    put(tmp_path, version=2, serving=LAST + "max_batch_size: 16\nmax_queue_size: 64")
    load(client, {"max_batch_size": 4, "version_policy": {"specific": {"versions": [1]}}})
    config = client.get_model_config("mlp").config
    assert (config.max_batch_size, infer(client)) == (4, "1")
    client.load_model("mlp")
    assert (client.get_model_config("mlp").config.max_batch_size, infer(client)) == (16, "2")


@pytest.mark.long
def test_the_configuration_that_the_server_shows_is_complete_and_may_be_sent_back(
    tmp_path: Path, client: Client
) -> None:
    serving = "max_queue_delay_ms: 1.5\nmax_queue_size: 9\nmax_queue_ms: 7\ninstances: 2\n"
    put(tmp_path, version=3, serving=LAST + serving)
    load(client, {"max_batch_size": "8", "versionPolicy": {"all": {}}})
    shown = client.get_model_config("mlp", as_json=True)["config"]
    assert (shown["max_batch_size"], shown["version_policy"]) == (8, {"all": {}})
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == "1500"
    bounds = {"default_timeout_microseconds": "7000", "allow_timeout_override": True, "max_queue_size": 9}
    assert shown["dynamic_batching"]["default_queue_policy"] == bounds
    assert shown["instance_group"][0]["count"] == 2
    client.unload_model("mlp")
    load(client, shown)
    assert client.get_model_config("mlp", as_json=True)["config"] == shown
    assert infer(client) == "3"


def test_files_and_named_repositories_are_rejected(tmp_path: Path, client: Client) -> None:
    put(tmp_path)
    code, text = refusal(lambda: client.load_model("mlp", config="{}", files={"file:1/model.onnx": b"onnx"}))
    assert (code, "'file:1/model.onnx'" in text) == ("INVALID_ARGUMENT", True)
    stub: Any = client._client_stub  # noqa: SLF001 -- its methods do not send this field
    for rpc, request in (
        (stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest),
        (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest),
    ):
        with pytest.raises(grpc.RpcError, match="repository_name") as error:
            rpc(request(model_name="mlp", repository_name="other"))
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert index(client) == [("mlp", "", "")]


# --- without explicit control -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_clients_may_load_models_only_under_explicit_control(tmp_path: Path, serve: Serve, mode: str) -> None:
    put(tmp_path)
    client = serve(model_control=mode)
    until(client.is_server_ready)
    for code, text in (refusal(lambda: client.load_model("mlp")), refusal(lambda: client.unload_model("mlp"))):
        assert (code, "--model-control explicit" in text) == ("UNIMPLEMENTED", True)
        assert "explicit model load / unload is not allowed" in text  # Triton's clients look for this text
    assert not any(word.startswith("model_repository") for word in client.get_server_metadata().extensions)
    assert index(client) == [("mlp", "1", "READY")]
