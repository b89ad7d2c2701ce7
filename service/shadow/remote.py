"""A model of another V2 server as the fp32 reference, called over gRPC from the process that compares.

Its metadata is first compared with the artifact. Tensors are sent raw, and accepted raw or typed. While the server
cannot be reached, samples fail at once, and it is tried again at growing intervals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from bf16kit.messages.errors import ConfigError, InvalidRequest, RuntimeFailure, Unavailable
from bf16kit.messages.wording import brief
from bf16kit.numerics.tensors import BY_NAME, Array, TensorSpec, describe
from bf16kit.protocol import inference_pb2 as pb
from service.config.certificates import read_authority
from service.drift.policy import Remote
from service.wire.tensors import decode_contents, decode_raw, encode_raw

_log = logging.getLogger(__name__)
SECONDS = 10.0  # timeout of one call: a longer one delays other samples too much to be worth it
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MESSAGE_OVERHEAD = 1 << 20  # bytes of a message besides its tensors
_LARGEST_OPTION = 2**31 - 1  # of a channel option, an int32
_SERVICE = "inference.GRPCInferenceService"  # the name on the wire; the messages' package has another name
_RPCS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
#: With these codes it rejects the sample; any other code counts as unreachable.
_REJECTIONS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
_FREE = -1


class RemoteReference:
    """A :class:`service.drift.shadow.Reference` on another server. For one thread."""

    def __init__(
        self,
        name: str,
        remote: Remote,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        max_bytes: int,
        authority: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_bytes`` bounds the outputs of one sample. ``authority``: PEM file to check certificates against, over
        TLS; it is read at each attempt to connect. None: the certificates that come with gRPC."""
        self.up = False
        self._name = name
        self._remote = remote
        self._inputs = inputs
        self._outputs = {spec.name: spec for spec in outputs}
        self._clock = clock
        self._pause = 0.0
        self._retry_at = clock()
        self._largest = min(max_bytes + _MESSAGE_OVERHEAD, _LARGEST_OPTION)
        self._authority = authority
        self._trusted: bytes | None = None
        self._channel: grpc.Channel | None = None

    def connect(self) -> None:
        """Check that the server has the expected model, unless it is too early to try again. Raises nothing."""
        if self.up or self._clock() < self._retry_at:
            return
        request = pb.ModelMetadataRequest(name=self._remote.model, version=self._remote.version)
        start = self._clock()
        try:
            self._open()
            response = self._metadata(request, timeout=SECONDS)
        except ConfigError as error:
            self._mark_down(str(error))
            return
        except grpc.RpcError as error:
            self._mark_down(_describe(error))
            return
        if reason := self._mismatch(response):
            self._mark_down(reason)
            return
        self.up, self._pause = True, 0.0
        _log.info("%s: live drift on: %s answers after %.1f s", self._name, self._remote, self._clock() - start)

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str], *, seconds: float) -> dict[str, Array]:
        """See :meth:`service.drift.shadow.Reference.run`."""
        self.connect()
        if not self.up:
            raise Unavailable(f"{self._remote} does not answer")
        try:
            response = self._infer(self._request(feeds, outputs), timeout=min(seconds, SECONDS))
        except grpc.RpcError as error:
            code = error.code()  # its message may quote the inputs, which must not be logged
            if code in _REJECTIONS:
                raise RuntimeFailure(f"{self._remote} rejected a sample with {code.name}") from None
            self._mark_down(code.name)
            raise Unavailable(f"{self._remote} does not answer") from None
        return self._outputs_of(response, feeds, outputs)

    def close(self) -> None:
        self.up = False
        if self._channel is not None:
            self._channel.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open a channel, unless one with the same trusted certificates is open.

        Raises ConfigError if their file cannot be used: without it the call would trust other certificates.
        """
        trusted = None
        if self._remote.tls and self._authority is not None:
            trusted = read_authority("reference_ca", self._authority)
        if self._channel is not None:
            if trusted == self._trusted:
                return
            self._channel.close()
        self._channel, self._trusted = self._new_channel(trusted), trusted
        self._metadata, self._infer = self._stub("ModelMetadata"), self._stub("ModelInfer")

    def _new_channel(self, trusted: bytes | None) -> grpc.Channel:
        options = [(f"grpc.max_{way}_message_length", self._largest) for way in ("receive", "send")]
        options.append(("grpc.enable_http_proxy", 0))  # connect directly: a proxy must not see clients' data
        # With the scheme, since gRPC takes a host named unix or vsock for a scheme.
        target = f"dns:///{self._remote.target}"
        if self._remote.tls:
            return grpc.secure_channel(target, grpc.ssl_channel_credentials(trusted), options=options)
        return grpc.insecure_channel(target, options=options)

    def _stub(self, method: str) -> Any:
        rpc = _RPCS[method]
        assert self._channel is not None  # noqa: S101 - for the type checker
        return self._channel.unary_unary(
            f"/{_SERVICE}/{method}",
            request_serializer=GetMessageClass(rpc.input_type).SerializeToString,
            response_deserializer=GetMessageClass(rpc.output_type).FromString,
        )

    def _mark_down(self, reason: str) -> None:
        """Mark the server as unreachable and schedule the next attempt, later each time.

        Each failed attempt is logged once.
        """
        self.up = False
        self._pause = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause))
        self._retry_at = self._clock() + self._pause
        _log.warning(
            "%s: no live drift: %s cannot serve as the fp32 reference: %s; trying again in %.0f s or later",
            self._name,
            self._remote,
            reason,
            self._pause,
        )

    def _mismatch(self, response: pb.ModelMetadataResponse) -> str:
        """Return why the server's model cannot be the same; "" if it can."""
        for side, specs, others in (
            ("input", self._inputs, response.inputs),
            ("output", tuple(self._outputs.values()), response.outputs),
        ):
            by_name = {other.name: other for other in others}
            for spec in specs:
                other = by_name.get(spec.name)
                if other is None:
                    return f"it has no {side} {spec.name!r}; it has {', '.join(sorted(by_name)) or 'none'}"
                if other.datatype != BY_NAME[spec.dtype].oip:
                    return f"its {side} {spec.name!r} is {other.datatype}, not {BY_NAME[spec.dtype].oip}"
                if not _fits(spec.shape, other.shape):
                    return f"its {side} {spec.name!r} has shape {list(other.shape)}, not {describe(spec.shape)}"
        more = sorted({each.name for each in response.inputs} - {spec.name for spec in self._inputs})
        return f"it has an input {more[0]!r}, which this model does not have" if more else ""

    def _request(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> pb.ModelInferRequest:
        request = pb.ModelInferRequest(model_name=self._remote.model, model_version=self._remote.version)
        for spec in self._inputs:
            array, dtype = feeds[spec.name], BY_NAME[spec.dtype]
            request.inputs.add(name=spec.name, datatype=dtype.oip, shape=array.shape)
            request.raw_input_contents.append(encode_raw(dtype, array))
        for name in outputs:
            request.outputs.add(name=name)
        return request

    def _outputs_of(
        self, response: pb.ModelInferResponse, feeds: Mapping[str, Array], outputs: Sequence[str]
    ) -> dict[str, Array]:
        found = {}
        try:
            for number, tensor in enumerate(response.outputs):
                if tensor.name not in outputs:
                    continue
                dtype, shape = BY_NAME[self._outputs[tensor.name].dtype], tuple(tensor.shape)
                if tensor.datatype != dtype.oip:
                    raise RuntimeFailure(f"{self._remote} returned {tensor.name!r} not as {dtype.oip}")
                if response.raw_output_contents:
                    found[tensor.name] = decode_raw(tensor.name, dtype, shape, response.raw_output_contents[number])
                else:
                    found[tensor.name] = decode_contents(tensor.name, dtype, shape, tensor.contents)
        except (InvalidRequest, IndexError):
            raise RuntimeFailure(f"{self._remote} returned bytes that do not fit their datatype and shape") from None
        if missing := [name for name in outputs if name not in found]:
            raise RuntimeFailure(f"{self._remote} did not return output {missing[0]!r}")
        return found


def _fits(ours: Sequence[int | str], theirs: Sequence[int]) -> bool:
    """Whether both shapes can be equal. A free dimension is a name in ``ours`` and −1 in ``theirs``."""
    return len(ours) == len(theirs) and all(
        isinstance(our, str) or _FREE in (our, their) or our == their for our, their in zip(ours, theirs, strict=True)
    )


def _describe(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {brief(error.details() or 'no reason', 200)}"
