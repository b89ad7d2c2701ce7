"""Checks of ModelStreamInfer: a response per request, in order, and errors that leave the stream open."""

from __future__ import annotations

from oip_conformance import judging
from oip_conformance.checks.metadata import UNKNOWN_NAME
from oip_conformance.checks.sources import OBSERVED, extension
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Code, check, must
from oip_conformance.target import Metadata, StreamResponse
from oip_conformance.wire import same

_SEQUENCE = extension("sequence")


def _stream(session: Session, *requests: pb.ModelInferRequest, metadata: Metadata = ()) -> StreamResponse:
    return session.target.stream(requests, metadata)


def _unknown(session: Session, request_id: str) -> pb.ModelInferRequest:
    request = session.request(request_id=request_id)
    request.model_name = UNKNOWN_NAME
    return request


def _must_end_ok(stream: StreamResponse, messages: int) -> None:
    must(stream.code is Code.OK, "the stream to end with OK", stream, f"{messages} requests")
    must(len(stream.messages) == messages, f"{messages} messages", stream, f"{messages} requests")


@check(
    "stream.answers",
    MUST,
    _SEQUENCE,
    "ModelStreamInfer: infer_response holds the results of a request, as ModelInfer's response; no error_message means success.",
    "sequence",
)
def answers(session: Session) -> None:
    request = session.request(request_id="one")
    stream = _stream(session, request)
    _must_end_ok(stream, 1)
    message = stream.messages[0]
    must(not message.error_message, "no error_message", stream, request)
    must(message.infer_response.id == "one", "id 'one'", message.infer_response.id)
    alone = session.outputs(request)
    for name, array in judging.outputs(session.model, request, message.infer_response).items():
        must(same(array, alone[name]), f"{name!r} as ModelInfer gives it", array.ravel()[:4])


@check("stream.in-order", TRITON, OBSERVED, "Answers come in the order of the requests.", "sequence")
def in_order(session: Session) -> None:
    sent = [str(number) for number in range(24)]
    stream = _stream(session, *(session.request(request_id=number) for number in sent))
    _must_end_ok(stream, len(sent))
    received = [message.infer_response.id for message in stream.messages]
    must(received == sent, f"ids {sent}", received)


@check(
    "stream.nothing-sent",
    TRITON,
    OBSERVED,
    "A stream on which nothing is sent ends with OK and no message.",
    "sequence",
)
def nothing_sent(session: Session) -> None:
    _must_end_ok(_stream(session), 0)


@check(
    "stream.error-message",
    MUST,
    _SEQUENCE,
    "error_message describes the error; the stream goes on with the next request.",
    "sequence",
)
def error_message(session: Session) -> None:
    stream = _stream(session, session.request(request_id="0"), _unknown(session, "1"), session.request(request_id="2"))
    _must_end_ok(stream, 3)
    errors = [bool(message.error_message) for message in stream.messages]
    must(errors == [False, True, False], "an error_message for the second of three requests alone", stream)
    must(stream.messages[2].infer_response.id == "2", "an answer to the third", stream)


@check(
    "stream.error-id",
    TRITON,
    OBSERVED,
    "infer_response beside an error_message has the id of the rejected request.",
    "sequence",
)
def error_id(session: Session) -> None:
    stream = _stream(session, _unknown(session, "the-bad-one"))
    _must_end_ok(stream, 1)
    must(stream.messages[0].infer_response.id == "the-bad-one", "id 'the-bad-one'", stream)


@check(
    "stream.grpc-error",
    TRITON,
    OBSERVED,
    "With the metadata triton_grpc_error: true, an error may end the stream with its status; what came before it is answered.",
    "sequence",
)
def grpc_error(session: Session) -> None:
    requests = session.request(request_id="0"), _unknown(session, "1")
    stream = _stream(session, *requests, metadata=(("triton_grpc_error", "true"),))
    must(stream.messages and stream.messages[0].infer_response.id == "0", "an answer to the first request", stream)
    errors = len(stream.messages) == 2 and stream.messages[1].error_message
    must(errors or stream.code is Code.NOT_FOUND, "NOT_FOUND at the end, or an error_message", stream)


@check(
    "stream.final-response",
    TRITON,
    OBSERVED,
    "With triton_enable_empty_final_response, the last response to a request has triton_final_response: true.",
    "sequence",
)
def final_response(session: Session) -> None:
    request = session.request(request_id="0")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    stream = _stream(session, request)
    must(stream.code is Code.OK and stream.messages, "an answer", stream, request)
    last = stream.messages[-1].infer_response.parameters
    must(last["triton_final_response"].bool_param, "triton_final_response: true", stream, request)
