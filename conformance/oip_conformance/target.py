"""The server under test: one channel, and all responses as values, including rejections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from oip_conformance.protocol import inference_pb2 as pb

SERVICE = "inference.GRPCInferenceService"
_RPCS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
_LARGEST = 64 << 20  # bytes of a response

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Response:
    """The result of a call: a message, or a status and its text."""

    message: Any
    code: grpc.StatusCode
    details: str = ""

    @property
    def ok(self) -> bool:
        return self.code is grpc.StatusCode.OK

    def __str__(self) -> str:
        if not self.ok:
            return f"{self.code.name}: {self.details[:600]!r}"
        return f"OK: {brief(self.message) or '(empty)'}"


@dataclass(slots=True)
class StreamResponse:
    """The result of a stream: its messages in order, and its final status."""

    messages: list[Any] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""

    def __str__(self) -> str:
        text = "; ".join(brief(message) or "(empty)" for message in self.messages) or "no message"
        return f"{text}; then {self.code.name}{f': {self.details[:300]!r}' if self.details else ''}"


class Target:
    """Calls RPCs by their names in the protocol. ``timeout``: seconds for each call."""

    def __init__(self, channel: grpc.Channel, timeout: float = 10.0, metadata: Metadata = ()) -> None:
        self._channel = channel
        self._timeout = timeout
        self._metadata = tuple(metadata)

    def wait(self, patience: float) -> bool:
        """Return whether a connection is established within ``patience`` seconds."""
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(timeout=patience)
        except grpc.FutureTimeoutError:
            ready.cancel()
            return False
        return True

    def call(self, message: Message, *, timeout: float | None = None, gzip: bool = False) -> Response:
        """Make the call of the inference service that takes this request, and return its result."""
        compression = grpc.Compression.Gzip if gzip else None
        return self._outcome(
            lambda: self._sender(message)(
                message, timeout=timeout or self._timeout, metadata=self._metadata, compression=compression
            )
        )

    def start(self, message: Message) -> grpc.Future[Any]:
        """Start a call without waiting for its result."""
        future: grpc.Future[Any] = self._sender(message).future(message, timeout=self._timeout, metadata=self._metadata)
        return future

    def _sender(self, message: Message) -> Any:
        rpc = rpc_of(message)
        return self._channel.unary_unary(
            f"/{SERVICE}/{rpc}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=GetMessageClass(_RPCS[rpc].output_type).FromString,
        )

    def finish(self, future: grpc.Future[Any]) -> Response:
        """Return the result of a call that was started."""
        return self._outcome(future.result)

    def raw(self, path: str, data: bytes) -> Response:
        """Send bytes to any path and return the result; its message is bytes."""
        send = self._channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
        return self._outcome(lambda: send(data, timeout=self._timeout, metadata=self._metadata))

    def stream(self, requests: Iterable[pb.ModelInferRequest], metadata: Metadata = ()) -> StreamResponse:
        """Send ``requests`` to ``ModelStreamInfer`` and return all responses."""
        return self.call_stream(
            f"/{SERVICE}/ModelStreamInfer",
            requests,
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
            metadata,
        )

    def call_stream(
        self,
        path: str,
        requests: Iterable[Any],
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        metadata: Metadata = (),
        most: int = 1000,
    ) -> StreamResponse:
        """Send ``requests`` to any stream and return at most ``most`` responses."""
        stream = StreamResponse()
        send = self._channel.stream_stream(path, request_serializer=serialize, response_deserializer=parse)
        answers = send(iter(requests), timeout=self._timeout, metadata=(*self._metadata, *metadata))
        try:
            for message in answers:
                stream.messages.append(message)
                if len(stream.messages) == most:
                    answers.cancel()
                    return stream
        except grpc.RpcError as error:
            stream.code, stream.details = _status(error)
        return stream

    def _outcome(self, call: Callable[[], Any]) -> Response:
        try:
            return Response(call(), grpc.StatusCode.OK)
        except grpc.RpcError as error:
            return Response(None, *_status(error))
        except grpc.FutureCancelledError:
            return Response(None, grpc.StatusCode.CANCELLED)


def connect(address: str, authority: bytes | None = None) -> grpc.Channel:
    """Return a channel with its own connection, which accepts large responses and uses no proxy.

    ``authority``: use TLS with these CA certificates (PEM); empty: with the machine's.
    """
    options = [
        ("grpc.max_receive_message_length", _LARGEST),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if authority is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority or None), options=options)


def rpc_of(message: Message) -> str:
    """Return the name of the RPC that takes this request."""
    return message.DESCRIPTOR.name.removesuffix("Request")


def brief(message: object, most: int = 600) -> str:
    """Return a message in one line, cut short."""
    text = " ".join(str(message).split())
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _status(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    return error.code(), error.details() or ""
