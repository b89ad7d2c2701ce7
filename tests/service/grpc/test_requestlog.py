"""The log line of each request and of each incident, as a server on a real socket writes them in both formats."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from loopback import LoopbackModel, infer_request, serving, until
from ownlog import own_log

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from service.config import logs
from service.contract import Array

PAYLOAD = "a-patients-name"
Configure = Callable[[str, logs.Format], io.StringIO]
HOSTILE = "id\n2026-01-01T00:00:00.000Z ERROR forged\x1b[2K"


@pytest.fixture(params=["text", "json"])
def kind(request: pytest.FixtureRequest) -> logs.Format:
    found: logs.Format = request.param
    return found


@pytest.fixture
def configure() -> Iterator[Configure]:
    """Yield a function that configures the log as ``bf16-serve`` does, and returns the stream that it writes to."""
    with ExitStack() as stack:
        yield lambda level, kind: stack.enter_context(own_log(level, kind))


def parsed(line: str, kind: logs.Format) -> dict[str, Any]:
    """Return an event's level, message and fields, all as strings."""
    if kind == "json":
        return {key: str(value) for key, value in json.loads(line).items()}
    found = re.fullmatch(r"\S+Z (?P<level>[A-Z]+) (?P<logger>\S+): (?P<message>.*)", line)
    assert found, line
    event = {**found.groupdict(), "level": found["level"].lower()}
    for name, quoted, plain in re.findall(r' ([a-z_]+)=(?:("(?:[^"\\]|\\.)*")|(\S+))', found["message"]):
        event[name] = json.loads(quoted) if quoted else plain
    return event


def events(stream: io.StringIO, kind: logs.Format, level: str) -> list[dict[str, Any]]:
    found = [parsed(line, kind) for line in stream.getvalue().splitlines()]
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


def test_each_request_is_logged_at_debug_with_its_times(configure: Configure, kind: logs.Format) -> None:
    stream = configure("debug", kind)
    with serving(model()) as served:
        served.call("ModelInfer", named())
        (answer,) = served.stub("ModelStreamInfer")(iter([named(request_id="r-2")]), timeout=30)
        assert answer.infer_response.id == "r-2"
        assert served.refusal("ModelInfer", named("nobody", "r-3"))[0] is StatusCode.NOT_FOUND
        assert served.refusal("ModelInfer", infer_request("named"))[0] is StatusCode.INVALID_ARGUMENT
        found = until(lambda: (lines := events(stream, kind, "debug")) and len(lines) == 4 and lines)
        measured = list(served.log.observations)
    answered, streamed, unknown, refused = found
    assert answered["message"].startswith("request answered")
    assert [answered[key] for key in ("model", "version", "request_id", "code")] == ["named", "3", "r-1", "OK"]
    for event, seen in zip((answered, streamed), measured, strict=False):
        assert seen.timings is not None
        assert float(event["total_s"]) == pytest.approx(seen.seconds, abs=1e-6)
        assert float(event["queue_s"]) == pytest.approx(seen.timings.queue, abs=1e-6)
        assert float(event["compute_s"]) == pytest.approx(seen.timings.compute, abs=1e-6)
    assert (streamed["request_id"], streamed["code"]) == ("r-2", "OK")
    assert [unknown.get(key) for key in ("model", "version", "code")] == ["nobody", None, "NOT_FOUND"]
    assert unknown["message"].startswith("request not answered")
    assert [refused.get(key) for key in ("request_id", "code", "queue_s")] == [None, "INVALID_ARGUMENT", None]
    assert PAYLOAD not in stream.getvalue()


def test_an_incident_is_logged_as_an_error_with_its_request(configure: Configure, kind: logs.Format) -> None:
    def fail(feeds: Mapping[str, Array]) -> dict[str, Array]:
        raise RuntimeFailure("node 7 gave up")

    stream = configure("info", kind)
    with serving(model(fail)) as served:
        code, details = served.refusal("ModelInfer", named())
        assert code is StatusCode.INTERNAL
        assert "node 7" not in details
    (event,) = events(stream, kind, "error")
    assert "node 7 gave up" in event["message"]
    assert [event[key] for key in ("model", "version", "request_id", "code")] == ["named", "3", "r-1", "INTERNAL"]
    assert event["incident"] in details
    assert "Traceback" in (event["exception"] if kind == "json" else event["message"])
    assert events(stream, kind, "debug") == []
    assert PAYLOAD not in stream.getvalue()


def test_a_clients_id_is_bounded_and_escaped(configure: Configure, kind: logs.Format) -> None:
    stream = configure("debug", kind)
    with serving(model()) as served:
        served.call("ModelInfer", named(request_id=HOSTILE))
        served.call("ModelInfer", named(request_id="i" * 100_000))
        hostile, endless = until(lambda: (lines := events(stream, kind, "debug")) and len(lines) == 2 and lines)
    assert hostile["request_id"] == HOSTILE
    assert endless["request_id"] == "i" * 256
    assert all(line.isprintable() for line in stream.getvalue().splitlines())
    assert len(stream.getvalue().splitlines()) == 2
