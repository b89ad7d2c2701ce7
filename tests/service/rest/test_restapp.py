"""Inference over HTTP and the limits that it shares with gRPC, over real sockets, and what hostile clients get."""

import contextlib
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from loopback import Gate, LoopbackModel, infer_request, serving
from restport import RestPort, read_answer, resting
from waiting import until

from bf16kit.numerics.tensors import TensorSpec
from bf16kit.service.config.tokens import TokenFile

X = np.ones((1, 3), np.float32)
ONE = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
BODY = json.dumps(ONE).encode()
NESTED = b"[" * 5000 + b"]" * 5000


def changed(**parts: Any) -> dict[str, Any]:
    return {"inputs": [{**ONE["inputs"][0], **parts}]}


@pytest.fixture(scope="module")
def port() -> Iterator[RestPort]:
    kinds = [TensorSpec(name, dtype, ("batch", 1)) for name, dtype in (("i", "int8"), ("b", "bool"), ("s", "string"))]
    half = LoopbackModel("half", outputs=[TensorSpec("y", "bfloat16", ("batch", 3))])
    typed = LoopbackModel("typed", lambda feeds: {"y": np.zeros((1, 3), np.float32)}, inputs=kinds)
    with serving(LoopbackModel(), half, typed) as served, resting(served, max_bytes=4 << 20) as rest:
        yield rest


# --- requests that are wrong ------------------------------------------------------------------------------------------

BINARY = changed(data=None, parameters={"binary_data_size": 12})
WRONG = [
    ("not JSON", b"{", "Invalid JSON"),
    ("nothing", b"", "Invalid JSON"),
    ("no UTF-8", b'{"id":"\xff","inputs":[]}', "Invalid JSON"),
    ("half a character", b'{"id":"\\ud800","inputs":[]}', "Invalid JSON"),
    ("a list", [], "should be an object"),
    ("nested 5,000 deep", BODY.replace(b"[1, 2, 3]", NESTED), "recursion limit"),
    ("a million values", BODY.replace(b"[1, 2, 3]", b"[" + b"1," * (1 << 20) + b"1]"), "at most 262144; send"),
    ("4,301 digits", BODY.replace(b"[1, 2, 3]", b"[1,2,3" + b"0" * 4300 + b"]"), "number out of range"),
    ("no inputs", {}, "'inputs': Field required"),
    ("a number as the name", changed(name=1), "'inputs.0.name': Input should be a valid string"),
    ("a fraction in the shape", changed(shape=[1, 3.5]), "'inputs.0.shape.1': Input should be a valid integer"),
    ("a size of 65 bits", changed(shape=[1, 1 << 64]), "'inputs.0.shape.1'"),
    ("65 dimensions", changed(shape=[1] * 65), "at most 64 items"),
    ("a timeout of 65 bits", changed() | {"parameters": {"timeout": 1 << 64}}, "'timeout' came as double_param"),
    ("a list as a parameter", changed() | {"parameters": {"timeout": []}}, "'parameters.timeout"),
    ("a negative timeout", changed() | {"parameters": {"timeout": -1}}, "'timeout' is -1"),
    ("a wrong count", changed(data=[1, 2]), "2 elements in data, expected 3 for shape [1, 3]"),
    ("text as a number", changed(data=["1", "2", "3"]), "'x' is FP32 and holds a value of type str"),
    ("true as a number", changed(data=[True, 2, 3]), "holds a value of type bool"),
    ("uneven lists", changed(data=[[1, 2], 3]), "holds a value of type list"),
    ("beyond fp32", changed(data=[1e39, 2, 3]), "outside the range of FP32"),
    ("bf16 in JSON", changed(datatype="BF16"), "BF16 are sent in binary"),
    ("an unknown datatype", changed(datatype="FP33"), "datatype 'FP33'"),
    ("no data", changed(data=None), "neither data nor the parameter binary_data_size"),
    (
        "binary and data",
        changed(parameters={"binary_data_size": 0}),
        "at most 0, which is left of the body, and no data",
    ),
    ("binary that is not there", BINARY, "binary_data_size 12, expected at most 0"),
    ("another input", changed(name="z"), "unknown input 'z'"),
    ("another shape", changed(shape=[3]), "rank 1"),
    ("an output that is not there", changed() | {"outputs": [{"name": "z"}]}, "unknown output 'z'"),
    ("bf16 out in JSON", changed() | {"outputs": [{"name": "y", "parameters": {"datatype": "BF16"}}]}, "binary_data"),
]


@pytest.mark.parametrize(("asked", "told"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
def test_a_wrong_request_is_told_what_is_wrong(port: RestPort, asked: object, told: str) -> None:
    status, answer, _ = port.infer(asked)
    assert (status, list(answer)) == (400, ["error"])
    assert told in answer["error"]
    assert len(answer["error"]) < 500


@pytest.mark.parametrize(
    ("length", "told"),
    [("-1", "'-1'"), ("9" * 5000, "'9999"), ("x", "'x'"), (str(len(BODY) + 1), "expected the number of bytes"),
     (str(len(BODY) - 1), "Invalid JSON")],
)  # fmt: skip
def test_a_wrong_length_of_the_json_is_refused(port: RestPort, length: str, told: str) -> None:
    status, answer, _ = port.infer(BODY, **{"Inference-Header-Content-Length": length})
    assert status == 400
    assert told in answer["error"]


@pytest.mark.parametrize(("size", "told"), [(8, "the body has 4 bytes more than"), (13, "at most 12"), (-1, "-1"),
                                            (True, "True"), (12.0, "12.0"), ("12", "'12'")])  # fmt: skip
def test_a_binary_size_that_does_not_fit_the_body_is_refused(port: RestPort, size: object, told: str) -> None:
    head = json.dumps(changed(data=None, parameters={"binary_data_size": size})).encode()
    status, answer, _ = port.infer(head + X.tobytes(), **{"Inference-Header-Content-Length": str(len(head))})
    assert status == 400
    assert told in answer["error"]


@pytest.mark.parametrize(
    ("data", "told"),
    [({"i": [128]}, "outside the range of INT8"), ({"i": [1.0]}, "type float"), ({"b": [1]}, "type int"),
     ({"s": [1]}, "type int"), ({}, "")],
)  # fmt: skip
def test_each_datatype_takes_its_own_values_only(port: RestPort, data: dict[str, Any], told: str) -> None:
    given = {"i": [-128], "b": [True], "s": ["é"], **data}
    names = {"i": "INT8", "b": "BOOL", "s": "BYTES"}
    inputs = [{"name": n, "datatype": names[n], "shape": [1, 1], "data": [given[n]]} for n in names]
    status, answer, _ = port.infer({"inputs": inputs}, "typed")
    assert (status, told in answer.get("error", "")) == (400 if told else 200, True)


@pytest.mark.parametrize(
    ("method", "path", "status", "told"),
    [("GET", "/v2/models/echo/infer", 405, "send POST"), ("POST", "/v2/models/echo", 405, "send GET"),
     ("POST", "/v2/models/nobody/infer", 404, "nobody"), ("POST", "/v2/models/echo/versions/2/infer", 404, "echo"),
     ("POST", "/v2/models/echo/versions/x/infer", 400, "not an integer"), ("GET", "/v2/models/nobody", 404, "nobody"),
     ("GET", "/v2/models/echo/stats", 404, "the gRPC port the rest"),
     ("POST", "/v2/repository/models/echo/load", 404, "the gRPC port the rest"), ("GET", "/v2x", 404, None)],
)  # fmt: skip
def test_other_paths_and_methods_say_where_to_go(
    port: RestPort, method: str, path: str, status: int, told: str | None
) -> None:
    found, answer, _ = port.ask(method, path, BODY if method == "POST" else None)
    assert found == status
    assert told is None or told in answer["error"]


def test_a_tensor_in_shared_memory_is_unsupported_as_over_grpc_where_that_is_off(port: RestPort) -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
    status, answer, _ = port.infer(changed(data=None, parameters=place))
    assert status == 501
    assert "input 'x' is in shared memory, which is off" in answer["error"]


# --- health and metadata ----------------------------------------------------------------------------------------------


def test_health_and_metadata_follow_the_models() -> None:
    model = LoopbackModel(state="loading")
    with serving(model) as served, resting(served) as rest:
        ready = "/v2/health/ready", "/v2/models/echo/ready", "/v2/models/echo/versions/1/ready"
        assert rest.ask("GET", "/v2/health/live")[:2] == (200, {"live": True})
        assert [rest.ask("GET", path)[:2] for path in ready] == [(400, {"ready": False})] * 3
        assert rest.infer(ONE)[0] == 503
        served.registry.change(model, "ready")
        assert [rest.ask("GET", path)[:2] for path in ready] == [(200, {"ready": True})] * 3
        _, told, _ = rest.ask("GET", "/v2/models/echo")
        assert (told["versions"], told["inputs"]) == (["1"], [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}])
        assert rest.ask("GET", "/v2")[1]["name"] == "bf16kit"
        assert rest.ask("HEAD", "/v2")[0] == 200


# --- limits that it shares with gRPC ----------------------------------------------------------------------------------


def test_places_are_shared_with_grpc_and_the_requests_of_both_are_observed() -> None:
    with Gate() as gate, serving(LoopbackModel(run=gate), max_in_flight=1) as served, resting(served) as rest:
        waiting = rest.begin(BODY)
        assert gate.started.wait(30)
        code, _ = served.refusal("ModelInfer", infer_request(x=X))
        status, answer, _ = rest.infer(ONE)
        assert (code, status) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 429)
        assert "1 requests in flight is the limit" in answer["error"]
        gate.go.set()
        assert read_answer(waiting)[0] == 200
        until(lambda: served.transport.pools["inference"].shares.in_use == 0)
        assert served.call("ModelInfer", infer_request(x=X))
        assert served.log.refusals == ["in_flight"] * 2
        assert [code for *_, code in served.log.seen] == ["OK"] * 2


def test_bytes_are_shared_with_grpc_from_the_first_that_arrives_until_the_response_is_sent() -> None:
    large = np.ones((4096, 3), np.float32)
    model = LoopbackModel(max_batch_size=8192)
    with serving(model, max_request_bytes=64 << 10) as served, resting(served) as rest:
        budget = served.transport.pools["inference"].budget
        held = rest.begin(b"x" * (60 << 10), 100 << 10)
        until(lambda: budget.in_use == 60 << 10)
        assert served.refusal("ModelInfer", infer_request(x=large))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        head = json.dumps(changed(shape=[4096, 3], data=None, parameters={"binary_data_size": large.nbytes})).encode()
        binary = head + large.tobytes()
        assert rest.infer(binary, **{"Inference-Header-Content-Length": str(len(head))})[0] == 429
        held.close()
        until(lambda: budget.in_use == 0)
        assert served.log.refusals == ["bytes"] * 2
        assert rest.infer(binary, **{"Inference-Header-Content-Length": str(len(head))})[0] == 200
        until(lambda: budget.in_use == 0)


def test_json_counts_with_the_memory_that_its_values_take_before_they_are_read() -> None:
    asked = changed(shape=[4096, 3], data=[1] * (3 * 4096))  # 37 KB of text, 786 KB of values
    model = LoopbackModel(max_batch_size=8192)
    with serving(model, max_request_bytes=256 << 10) as served, resting(served) as rest:
        budget = served.transport.pools["inference"].budget
        with rest.begin(b"{", 2):
            until(lambda: budget.in_use == 1)
            assert rest.infer(asked)[0] == 429
        until(lambda: budget.in_use == 0)
        assert rest.infer(asked)[0] == 200, "a request that is alone may take any number"
        assert served.log.refusals == ["bytes"]


def test_the_bytes_of_a_response_are_counted_once() -> None:
    rows = np.ones((8192, 3), np.float32)
    model = LoopbackModel(run=lambda feeds: {"y": rows})
    limit = 3 * rows.nbytes // 2  # and one byte is another's: a request that is alone may hold more than the limit
    with serving(model, max_request_bytes=limit) as served, resting(served) as rest, rest.begin(b"{", 2):
        until(lambda: served.transport.pools["inference"].budget.in_use == 1)
        assert rest.infer(ONE | {"parameters": {"binary_data_output": True}})[0] == 200


def test_a_client_that_leaves_cancels_its_request_and_a_timeout_ends_it() -> None:
    model = LoopbackModel(run=(gate := Gate()), max_batch_size=0)
    with gate, serving(model) as served, resting(served) as rest:
        running = rest.begin(BODY)
        assert gate.started.wait(30)
        leaving = rest.begin(BODY)
        until(lambda: len(model.seen) == 2)
        leaving.close()
        until(lambda: [code for *_, code in served.log.seen] == ["CANCELLED"])
        late = rest.begin(json.dumps(ONE | {"parameters": {"timeout": 1}}).encode())
        assert read_answer(late)[0] == 504
        gate.go.set()
        assert read_answer(running)[0] == 200
        assert model.calls == 1
        assert [code for *_, code in served.log.seen] == ["CANCELLED", "DEADLINE_EXCEEDED", "OK"]


@pytest.mark.parametrize("slow", ["receive", "send"])
def test_a_client_that_neither_sends_nor_reads_loses_its_place(slow: str) -> None:
    rows = np.ones((1 << 20, 3), np.float32)  # the response is more than the sockets hold
    model = LoopbackModel(run=lambda feeds: {"y": rows})
    with serving(model, **{f"{slow}_seconds": 0.4}) as served, resting(served) as rest:  # type: ignore[arg-type]
        asked = json.dumps(ONE | {"parameters": {"binary_data_output": True}}).encode()
        peer = rest.begin(asked if slow == "send" else asked[:-1], len(asked))
        shares = served.transport.pools["inference"].shares
        until(lambda: shares.in_use)
        until(lambda: not shares.in_use)
        assert served.log.refusals == ["too_slow"]
        peer.close()


@pytest.mark.long
def test_a_client_that_reads_no_errors_is_disconnected() -> None:
    again = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{" * 100
    with serving(LoopbackModel(), send_seconds=0.4) as served, resting(served) as rest, rest.begin(b"{") as peer:
        peer.settimeout(1)
        with contextlib.suppress(OSError):  # the sockets hold no more errors, and thus no more requests; or it is over
            while True:
                peer.sendall(again)
        until(lambda: served.log.refusals == ["too_slow"])
        until(lambda: not served.transport.pools["inference"].shares.in_use)


def test_a_request_that_runs_is_in_memory_once_beside_its_message() -> None:
    rows = np.ones((1 << 20, 3), np.float32)
    head = json.dumps(changed(shape=[1 << 20, 3], data=None, parameters={"binary_data_size": rows.nbytes})).encode()
    asked = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n" % len(head)
    asked += b"Content-Length: %d\r\n\r\n" % (len(head) + rows.nbytes) + head + rows.tobytes()
    with Gate() as gate, serving(LoopbackModel(run=gate, max_batch_size=0)) as served, resting(served) as rest:
        tracemalloc.start()
        with socket.create_connection(("127.0.0.1", rest.port), timeout=60) as peer:
            peer.sendall(asked)
            assert gate.started.wait(30)
            assert tracemalloc.get_traced_memory()[0] < 1.5 * rows.nbytes  # the array of the model's input
            tracemalloc.stop()
            gate.go.set()


def test_waiting_for_a_model_is_not_waiting_for_the_client() -> None:
    limits: dict[str, Any] = {"response_seconds": 0.2, "idle_seconds": 0.2, "connections": 2}
    with Gate() as gate, serving(LoopbackModel(run=gate)) as served, resting(served, **limits) as rest:
        waiting = rest.begin(BODY)
        assert gate.started.wait(30)
        idle = [rest.begin(b"", 5) for _ in range(4)]
        until(lambda: served.log.refusals.count("http_connections") == 3)
        threading.Timer(0.5, gate.go.set).start()
        assert read_answer(waiting)[0] == 200
        for peer in idle:
            peer.close()


def test_what_is_too_large_is_refused_before_it_is_read(port: RestPort) -> None:
    status, answer, headers = read_answer(port.begin(b"", (4 << 20) + 1))  # and none of it is sent
    assert (status, headers["Connection"]) == (413, "close")
    assert "4194305 bytes or more, expected at most 4194304 (max_message_bytes)" in answer["error"]

    def endless() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * (1 << 16)

    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # closed before this client reads the response
        assert port.ask("POST", "/v2/models/echo/infer", endless())[0] == 413
    assert port.infer(b"x" * 100, **{"Content-Encoding": "gzip"})[0] == 415
    assert port.infer(ONE)[0] == 200


def test_a_stopping_server_rejects_new_requests_and_waits_for_those_that_run() -> None:
    with Gate() as gate, serving(LoopbackModel(run=gate)) as served, resting(served) as rest:
        running = rest.begin(BODY)
        assert gate.started.wait(30)
        stopped: list[bool] = []
        stopping = threading.Thread(target=lambda: stopped.append(served.transport.stop(20)))
        stopping.start()
        until(lambda: rest.infer(ONE)[0] == 503)
        assert not stopped
        gate.go.set()
        assert read_answer(running)[0] == 200
        stopping.join()
        assert stopped == [True]


def test_inference_needs_its_token_and_probes_none(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("reader-0123456789abcdef read\nwriter-0123456789abcdef infer\n")
    path.chmod(0o600)
    tokens = TokenFile(path)
    with serving(LoopbackModel(), tokens=tokens) as served, resting(served, tokens=tokens) as rest:
        reads, infers = ({"Authorization": f"Bearer {who}-0123456789abcdef"} for who in ("reader", "writer"))
        status, answer, headers = rest.infer(ONE)
        assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="bf16kit"')
        assert "a token is needed" in answer["error"]
        assert [rest.infer(ONE, **who)[0] for who in (reads, infers)] == [403, 200]
        assert [rest.ask("GET", "/v2/models/echo", headers=who)[0] for who in ({}, reads, infers)] == [401, 200, 403]
        assert rest.ask("GET", "/v2/elsewhere")[0] == 401
        probes = "/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready"
        assert [rest.ask("GET", probe)[0] for probe in probes] == [200] * 3
        assert served.log.refusals == ["unauthenticated", "forbidden"] * 2 + ["unauthenticated"]


def test_a_bug_gets_an_incident_and_no_text() -> None:
    def broken(feeds: Any) -> dict[str, Any]:
        raise RuntimeError("secret")

    with serving(LoopbackModel(run=broken)) as served, resting(served) as rest:
        status, answer, _ = rest.infer(ONE)
        assert status == 500
        assert "incident" in answer["error"]
        assert "secret" not in answer["error"]
