"""Checks of ModelStreamInfer: a response per request, in order, and errors that leave the stream open."""

from __future__ import annotations

from conformance import judging
from conformance.checks.metadata import NOBODY
from conformance.checks.sources import SEEN, extension
from conformance.protocol import inference_pb2 as pb
from conformance.session import Session
from conformance.suite import Code, Level, check, must
from conformance.target import Conversation, Metadata
from conformance.wire import same

_SEQUENCE = extension("sequence")


def _stream(session: Session, *requests: pb.ModelInferRequest, metadata: Metadata = ()) -> Conversation:
    return session.target.stream(requests, metadata)


def _unknown(session: Session, request_id: str) -> pb.ModelInferRequest:
    request = session.request(request_id=request_id)
    request.model_name = NOBODY
    return request


def _ended_well(seen: Conversation, messages: int) -> None:
    must(seen.code is Code.OK, "the stream to end with OK", seen, f"{messages} requests")
    must(len(seen.messages) == messages, f"{messages} messages", seen, f"{messages} requests")


@check(
    "stream.answers",
    Level.MUST,
    _SEQUENCE,
    "ModelStreamInfer: infer_response holds the results of a request, as ModelInfer's response; no error_message means success.",
    "sequence",
)
def answers(session: Session) -> None:
    request = session.request(request_id="one")
    seen = _stream(session, request)
    _ended_well(seen, 1)
    message = seen.messages[0]
    must(not message.error_message, "no error_message", seen, request)
    must(message.infer_response.id == "one", "id 'one'", message.infer_response.id)
    alone = session.outputs(request)
    for name, array in judging.outputs(session.model, request, message.infer_response).items():
        must(same(array, alone[name]), f"{name!r} as ModelInfer gives it", array.ravel()[:4])


@check("stream.in-order", Level.TRITON, SEEN, "Answers come in the order of the requests.", "sequence")
def in_order(session: Session) -> None:
    sent = [str(number) for number in range(24)]
    seen = _stream(session, *(session.request(request_id=number) for number in sent))
    _ended_well(seen, len(sent))
    came = [message.infer_response.id for message in seen.messages]
    must(came == sent, f"ids {sent}", came)


@check(
    "stream.nothing-sent",
    Level.TRITON,
    SEEN,
    "A stream on which nothing is sent ends with OK and no message.",
    "sequence",
)
def nothing_sent(session: Session) -> None:
    _ended_well(_stream(session), 0)


@check(
    "stream.error-message",
    Level.MUST,
    _SEQUENCE,
    "error_message describes the error; the stream goes on with the next request.",
    "sequence",
)
def error_message(session: Session) -> None:
    seen = _stream(session, session.request(request_id="0"), _unknown(session, "1"), session.request(request_id="2"))
    _ended_well(seen, 3)
    told = [bool(message.error_message) for message in seen.messages]
    must(told == [False, True, False], "an error_message for the second of three requests alone", seen)
    must(seen.messages[2].infer_response.id == "2", "an answer to the third", seen)


@check(
    "stream.error-id",
    Level.TRITON,
    SEEN,
    "infer_response beside an error_message bears the id of the request that it is about.",
    "sequence",
)
def error_id(session: Session) -> None:
    seen = _stream(session, _unknown(session, "the-bad-one"))
    _ended_well(seen, 1)
    must(seen.messages[0].infer_response.id == "the-bad-one", "id 'the-bad-one'", seen)


@check(
    "stream.grpc-error",
    Level.TRITON,
    SEEN,
    "With the metadata triton_grpc_error: true, an error may end the stream with its status; what came before it is answered.",
    "sequence",
)
def grpc_error(session: Session) -> None:
    requests = session.request(request_id="0"), _unknown(session, "1")
    seen = _stream(session, *requests, metadata=(("triton_grpc_error", "true"),))
    must(seen.messages and seen.messages[0].infer_response.id == "0", "an answer to the first request", seen)
    told = len(seen.messages) == 2 and seen.messages[1].error_message
    must(told or seen.code is Code.NOT_FOUND, "NOT_FOUND at the end, or an error_message", seen)


@check(
    "stream.final-response",
    Level.TRITON,
    SEEN,
    "With triton_enable_empty_final_response, the last response to a request has triton_final_response: true.",
    "sequence",
)
def final_response(session: Session) -> None:
    request = session.request(request_id="0")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    seen = _stream(session, request)
    must(seen.code is Code.OK and seen.messages, "an answer", seen, request)
    last = seen.messages[-1].infer_response.parameters
    must(last["triton_final_response"].bool_param, "triton_final_response: true", seen, request)
