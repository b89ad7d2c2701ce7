"""The log line of each request and of each incident, as a server on a real socket writes them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from loopback import LoopbackModel, infer_request, serving, until
from ownlog import own_log

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from service.contract import Array

PAYLOAD = "a-patients-name"


def events(stream: io.StringIO, level: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [event for event in found if event["level"] == level and event["logger"].startswith("service.")]


def named(name: str = "named", request_id: str = "r-1", value: str = PAYLOAD) -> pb.ModelInferRequest:
    message = infer_request(name, name=np.array([[value]], np.object_))
    message.id = request_id
    return message


def model(run: Callable[[Mapping[str, Array]], dict[str, Array]] | None = None) -> LoopbackModel:
    """Return a model that returns its string input."""
    return LoopbackModel(
        "named",
        run or (lambda feeds: {"y": feeds["name"]}),
        version=3,
        inputs=[TensorSpec("name", "string", ("batch", 1))],
        outputs=[TensorSpec("y", "string", ("batch", 1))],
    )


def test_each_request_is_logged_at_debug_with_its_times() -> None:
    with own_log("debug", "json") as stream, serving(model()) as served:
        served.call("ModelInfer", named())
        (answer,) = served.stub("ModelStreamInfer")(iter([named(request_id="r-2")]), timeout=30)
        assert answer.infer_response.id == "r-2"
        assert served.refusal("ModelInfer", named("nobody", "r-3"))[0] is StatusCode.NOT_FOUND
        assert served.refusal("ModelInfer", infer_request("named"))[0] is StatusCode.INVALID_ARGUMENT
        found = until(lambda: (lines := events(stream, "debug")) and len(lines) == 4 and lines)
        measured = list(served.log.observations)
        assert PAYLOAD not in stream.getvalue()
    answered, streamed, unknown, refused = found
    assert answered["message"].startswith("request answered")
    assert [answered[key] for key in ("model", "version", "request_id", "code")] == ["named", "3", "r-1", "OK"]
    for event, seen in zip((answered, streamed), measured, strict=False):
        assert seen.timings is not None
        assert event["total_s"] == pytest.approx(seen.seconds, abs=1e-6)
        assert event["queue_s"] == pytest.approx(seen.timings.queue, abs=1e-6)
        assert event["compute_s"] == pytest.approx(seen.timings.compute, abs=1e-6)
    assert (streamed["request_id"], streamed["code"]) == ("r-2", "OK")
    assert [unknown.get(key) for key in ("model", "version", "code")] == ["nobody", None, "NOT_FOUND"]
    assert unknown["message"].startswith("request not answered")
    assert [refused.get(key) for key in ("request_id", "code", "queue_s")] == [None, "INVALID_ARGUMENT", None]


def test_an_incident_is_logged_as_an_error_with_its_request() -> None:
    def fail(feeds: Mapping[str, Array]) -> dict[str, Array]:
        raise RuntimeFailure("node 7 gave up")

    with own_log("info", "json") as stream, serving(model(fail)) as served:
        code, details = served.refusal("ModelInfer", named())
        assert code is StatusCode.INTERNAL
        assert "node 7" not in details
        assert PAYLOAD not in stream.getvalue()
        assert events(stream, "debug") == []
        (event,) = events(stream, "error")
    assert "node 7 gave up" in event["message"]
    assert [event[key] for key in ("model", "version", "request_id", "code")] == ["named", "3", "r-1", "INTERNAL"]
    assert event["incident"] in details
    assert "Traceback" in event["exception"]
