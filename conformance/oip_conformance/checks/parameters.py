"""Checks of a request's parameters: reserved ones, a server's own, and unknown ones."""

from __future__ import annotations

from collections.abc import Callable

from oip_conformance.checks.sources import OBSERVED, OIP, extension
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Check, Code, InvalidCall, check, must, refusal

Set = Callable[[pb.InferParameter], None]


def _string(value: str) -> Set:
    return lambda parameter: setattr(parameter, "string_param", value)


def _integer(value: int) -> Set:
    return lambda parameter: setattr(parameter, "int64_param", value)


def _natural(value: int) -> Set:
    return lambda parameter: setattr(parameter, "uint64_param", value)


def _truth(value: bool) -> Set:
    return lambda parameter: setattr(parameter, "bool_param", value)


def _with(session: Session, **parameters: Set) -> pb.ModelInferRequest:
    request = session.request()
    for name, put in parameters.items():
        put(request.parameters[name])
    return request


@check(
    "parameters.unknown",
    MUST,
    OIP,
    "A server can implement server-specific parameters; one that it does not know changes nothing.",
)
def unknown(session: Session) -> None:
    for put in (_string("x"), _integer(7), _truth(True)):
        session.outputs(_with(session, conformance_parameter=put))


@check(
    "parameters.unknown-of-tensors",
    TRITON,
    OBSERVED,
    "Parameters of an input or of a requested output that are not known change nothing.",
)
def unknown_of_tensors(session: Session) -> None:
    request = session.request(outputs=[session.model.outputs[0].name])
    request.inputs[0].parameters["conformance_parameter"].int64_param = 7
    request.outputs[0].parameters["conformance_parameter"].int64_param = 7
    session.outputs(request)


@check(
    "parameters.timeout",
    MUST,
    extension("schedule_policy"),
    "timeout: int64, microseconds. One that is long enough changes nothing.",
    "schedule_policy",
)
def timeout(session: Session) -> None:
    session.outputs(_with(session, timeout=_integer(60_000_000)))


@check(
    "parameters.priority",
    MUST,
    extension("schedule_policy"),
    "priority: int64; 0 is the default level, 1 the highest.",
    "schedule_policy",
)
def priority(session: Session) -> None:
    for put in (_integer(0), _integer(1), _natural(0), _natural(1)):
        session.outputs(_with(session, priority=put))


@check(
    "parameters.sequence-of-stateless",
    TRITON,
    OBSERVED,
    "A model without sequences answers a request with sequence_id as one without (or rejects it as an invalid argument).",
)
def sequence_of_stateless(session: Session) -> None:
    request = _with(session, sequence_id=_integer(7), sequence_start=_truth(True), sequence_end=_truth(True))
    response = session.target.call(request)
    must(response.ok or response.code is Code.INVALID_ARGUMENT, "an answer or INVALID_ARGUMENT", response, request)


def _refused(name: str, needs: str, rule: str, **parameters: Set) -> tuple[Check, ...]:
    return refusal(
        f"parameters.{name}", TRITON, OBSERVED, rule, [Code.INVALID_ARGUMENT],
        lambda session: InvalidCall(_with(session, **parameters), [*parameters, "triton_"]), needs,
    )  # fmt: skip


TIMEOUT_TEXT = _refused("timeout-a-string", "schedule_policy", "timeout is an integer.", timeout=_string("soon"))
PRIORITY_TEXT = _refused("priority-a-string", "schedule_policy", "priority is an integer.", priority=_string("high"))
PRIORITY_NEGATIVE = _refused("priority-negative", "schedule_policy", "priority is 0 or more.", priority=_integer(-1))
SEQUENCE_TRUTH = _refused("sequence-id-a-bool", "sequence", "sequence_id is an integer or a string.", sequence_id=_truth(True))  # fmt: skip
START_A_NUMBER = _refused(
    "sequence-start-a-number", "sequence", "sequence_start is a bool.", sequence_start=_integer(1)
)
RESERVED = _refused("reserved-prefix", "parameters", "Names that begin with triton_ are reserved.", triton_conformance=_string("x"))  # fmt: skip
WITHOUT_VALUE = _refused("without-value", "parameters", "A parameter has a value.", conformance_parameter=lambda p: p.SetInParent())  # fmt: skip
