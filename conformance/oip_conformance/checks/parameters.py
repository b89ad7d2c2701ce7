"""Checks of a request's parameters: reserved ones, a server's own, and unknown ones."""

from __future__ import annotations

from oip_conformance.checks.sources import OBSERVED, OIP, extension
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Check, Code, InvalidCall, check, must, refusal

Parameter = pb.InferParameter


def _with(session: Session, **parameters: Parameter) -> pb.ModelInferRequest:
    request = session.request()
    for name, parameter in parameters.items():
        request.parameters[name].CopyFrom(parameter)
    return request


@check(
    "parameters.unknown",
    MUST,
    OIP,
    "A server can implement server-specific parameters; one that it does not know changes nothing.",
)
def unknown(session: Session) -> None:
    for parameter in (Parameter(string_param="x"), Parameter(int64_param=7), Parameter(bool_param=True)):
        session.outputs(_with(session, conformance_parameter=parameter))


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
    session.outputs(_with(session, timeout=Parameter(int64_param=60_000_000)))


@check(
    "parameters.priority",
    MUST,
    extension("schedule_policy"),
    "priority: int64; 0 is the default level, 1 the highest.",
    "schedule_policy",
)
def priority(session: Session) -> None:
    for parameter in (
        Parameter(int64_param=0),
        Parameter(int64_param=1),
        Parameter(uint64_param=0),
        Parameter(uint64_param=1),
    ):
        session.outputs(_with(session, priority=parameter))


@check(
    "parameters.sequence-of-stateless",
    TRITON,
    OBSERVED,
    "A model without sequences answers a request with sequence_id as one without (or rejects it as an invalid argument).",
)
def sequence_of_stateless(session: Session) -> None:
    request = _with(
        session,
        sequence_id=Parameter(int64_param=7),
        sequence_start=Parameter(bool_param=True),
        sequence_end=Parameter(bool_param=True),
    )
    response = session.target.call(request)
    must(response.ok or response.code is Code.INVALID_ARGUMENT, "an answer or INVALID_ARGUMENT", response, request)


def _refused(name: str, needs: str, rule: str, **parameters: Parameter) -> tuple[Check, ...]:
    return refusal(
        f"parameters.{name}", TRITON, OBSERVED, rule, [Code.INVALID_ARGUMENT],
        lambda session: InvalidCall(_with(session, **parameters), [*parameters, "triton_"]), needs,
    )  # fmt: skip


TIMEOUT_TEXT = _refused(
    "timeout-a-string", "schedule_policy", "timeout is an integer.", timeout=Parameter(string_param="soon")
)
PRIORITY_TEXT = _refused(
    "priority-a-string", "schedule_policy", "priority is an integer.", priority=Parameter(string_param="high")
)
PRIORITY_NEGATIVE = _refused(
    "priority-negative", "schedule_policy", "priority is 0 or more.", priority=Parameter(int64_param=-1)
)
SEQUENCE_TRUTH = _refused("sequence-id-a-bool", "sequence", "sequence_id is an integer or a string.", sequence_id=Parameter(bool_param=True))  # fmt: skip
START_A_NUMBER = _refused(
    "sequence-start-a-number", "sequence", "sequence_start is a bool.", sequence_start=Parameter(int64_param=1)
)
RESERVED = _refused("reserved-prefix", "parameters", "Names that begin with triton_ are reserved.", triton_conformance=Parameter(string_param="x"))  # fmt: skip
WITHOUT_VALUE = _refused("without-value", "parameters", "A parameter has a value.", conformance_parameter=Parameter())  # fmt: skip
