"""The statuses that clients get when Ray fails, or when a client misbehaves. A front without a cluster answers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from raycluster import request

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.config.serverconfig import ServerConfig

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # warnings of Ray and its libraries


class Context:
    """The part of Ray's context of a call that is used."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.told: tuple[Any, str] = (None, "")
        self.invocation_metadata = lambda: list(metadata)
        self.peer = lambda: "ipv4:127.0.0.1:1"

    def set_code(self, code: Any) -> None:
        self.told = code, self.told[1]

    def set_details(self, words: str) -> None:
        self.told = self.told[0], words


class Handle:
    """Answers as a model's handle does, with one outcome."""

    def __init__(self, outcome: Any) -> None:
        self.answer = self
        self.asked: list[Any] = []
        self.cancelled = False
        self.outcome = outcome

    def remote(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return self

    def __await__(self) -> Any:
        if self.outcome is None:
            return asyncio.Event().wait().__await__()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return asyncio.sleep(0, self.outcome).__await__()

    def cancel(self) -> None:
        self.cancelled = True


def _front(tmp_path: Path, outcome: Any = b"", *, without_replica: bool = False, **settings: Any) -> tuple[Any, Handle]:
    from bf16kit.deploy.ray.front import Front
    from bf16kit.deploy.ray.models import Report, RunningModel, RunningModels

    handle, models = Handle(outcome), RunningModels()
    models.by_name["mlp"] = RunningModel("mlp", handle)
    models.by_name["mlp"].reports = () if without_replica else (Report("", (), ()),)
    return Front(ServerConfig(repository=tmp_path, **settings), 1 << 20, models), handle


def test_clients_do_not_get_rays_error_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ray.exceptions import ActorDiedError
    from ray.serve.exceptions import BackPressureError

    for error, code, words in (
        (BackPressureError(3, 2), StatusCode.RESOURCE_EXHAUSTED, "the queue for the replicas is full; try again later"),
        (ActorDiedError(), StatusCode.UNAVAILABLE, "the replica that had this request is gone, incident "),
        (RuntimeError("actor 17"), StatusCode.UNAVAILABLE, "; send it again"),
    ):
        front, _ = _front(tmp_path, error)
        context = Context()
        assert asyncio.run(front.ModelInfer(request(), context)).SerializeToString() == b""
        assert context.told[0] is code
        assert words in context.told[1]
        assert "actor" not in context.told[1]
        assert ("actor" in capsys.readouterr().err) is (code is StatusCode.UNAVAILABLE)


def test_a_request_is_cancelled_if_its_call_is(tmp_path: Path) -> None:
    front, handle = _front(tmp_path, None)

    async def cancelled() -> None:
        call = asyncio.ensure_future(front.ModelInfer(request(), Context()))
        while not handle.asked:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancelled())
    assert handle.cancelled


TOKEN = "looker-looker-looker-looker"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    (tmp_path / "tokens").write_text(f"{TOKEN} read\n")
    return str(tmp_path / "tokens")


def test_what_does_not_reach_a_replica(tmp_path: Path, tokens: str) -> None:
    may_read = ("authorization", f"Bearer {TOKEN}")
    limits: dict[str, Any] = {"token_file": tokens, "max_message_bytes": 1 << 10}
    front, handle = _front(tmp_path, **limits)
    down, unasked = _front(tmp_path, without_replica=True, **limits)

    def told(method: str, data: bytes, *metadata: tuple[str, str], front: Any = front) -> tuple[Any, str]:
        context = Context(*metadata)
        asyncio.run(getattr(front, method)(data, context))
        return context.told

    assert told("ModelInfer", request())[0] is StatusCode.UNAUTHENTICATED
    assert told("ModelInfer", request(), may_read)[0] is StatusCode.PERMISSION_DENIED
    too_large = "the message has 2049 bytes; max_message_bytes is 1024"
    large = b"\x0a" + bytes(1 << 11)
    assert told("ModelMetadata", large, may_read) == (StatusCode.RESOURCE_EXHAUSTED, too_large)
    no_replica = "no replica of model 'mlp' is ready; try again later"
    assert told("ModelMetadata", b"\x0a\x03mlp", may_read, front=down) == (StatusCode.UNAVAILABLE, no_replica)
    assert not handle.asked + unasked.asked


def test_requests_in_flight_have_a_limit_in_bytes(tmp_path: Path) -> None:
    front, handle = _front(tmp_path, None)

    async def asked() -> Context:
        refused, large = Context(), request(id="x" * (600 << 10))
        waiting = asyncio.ensure_future(front.ModelInfer(large, Context()))
        while not handle.asked:
            await asyncio.sleep(0)
        await front.ModelInfer(large, refused)
        waiting.cancel()
        await asyncio.wait([waiting])
        handle.outcome = b"answer"
        assert (await front.ModelInfer(large, Context())).SerializeToString() == b"answer"
        return refused

    code, words = asyncio.run(asked()).told
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert "the limit is 1048576; try again later" in words


def test_an_error_of_a_stream_names_its_request_unless_it_is_large(tmp_path: Path) -> None:
    """All calls would wait while a large request is parsed."""

    async def requests() -> AsyncIterator[bytes]:
        yield request("nobody", id="7")
        yield request("nobody", id="x" * (64 << 10))
        yield b"\xff"

    async def found() -> list[Any]:
        front = _front(tmp_path)[0]
        return [
            pb.ModelStreamInferResponse.FromString(each.SerializeToString())
            async for each in front.ModelStreamInfer(requests(), Context())
        ]

    unknown, large, broken = asyncio.run(found())
    assert (unknown.infer_response.id, unknown.error_message) == ("7", "unknown model 'nobody'")
    assert (large.infer_response.id, large.error_message) == ("", "unknown model 'nobody'")
    assert "not a message of this RPC" in broken.error_message


def test_eight_requests_of_a_stream_are_answered_at_once(tmp_path: Path) -> None:
    front, handle = _front(tmp_path, None)

    async def requests() -> AsyncIterator[bytes]:
        while True:
            yield request()

    async def begun() -> None:
        with pytest.raises(TimeoutError):  # none of them is answered
            await asyncio.wait_for(anext(front.ModelStreamInfer(requests(), Context())), 0.5)

    asyncio.run(begun())
    assert len(handle.asked) == 8


def test_open_streams_and_watches_are_limited_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bf16kit.deploy.ray.front import StreamEnd

    monkeypatch.setattr("bf16kit.deploy.ray.front.LONG_CALLS", 2)
    front, _ = _front(tmp_path, b"answer")

    async def requests() -> AsyncIterator[bytes]:
        yield request()

    async def rejected() -> list[Context]:
        contexts = [Context(), Context()]
        opened = front.Watch(b"", Context()), front.ModelStreamInfer(requests(), Context())
        for each in opened:
            await anext(each)
        for call in (front.Watch(b"", contexts[0]), front.ModelStreamInfer(requests(), contexts[1])):
            with pytest.raises(StreamEnd):
                await anext(call)
        for each in opened:
            await each.aclose()
            await anext(front.Watch(b"", Context()))  # in its place
        return contexts

    for context in asyncio.run(rejected()):
        assert context.told[0] is StatusCode.RESOURCE_EXHAUSTED
        assert "2 open streams and watches are the limit" in context.told[1]


def test_a_stream_without_a_token_ends_with_a_status(tmp_path: Path, tokens: str) -> None:
    from bf16kit.deploy.ray.front import StreamEnd

    front, context = _front(tmp_path, token_file=tokens)[0], Context()

    async def ended() -> None:
        with pytest.raises(StreamEnd):
            await anext(front.ModelStreamInfer(None, context))

    asyncio.run(ended())
    assert context.told[0] is StatusCode.UNAUTHENTICATED
