"""What is wrong with a server, one thing at a time: twists of :mod:`oipserver`, each with the checks that must notice.

A twist changes what one RPC answers, or what it is asked. What has a number of cases is written once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet
from oipextensions import Refused
from oipserver import Twist

from conformance.protocol import inference_pb2 as pb
from conformance.protocol import probes_pb2 as probes
from conformance.wire import DATATYPES

Code = grpc.StatusCode
Change = Callable[[Any, Any], Any]  # of a request and its answer: the answer to give, None: the one given, changed


def after(rpc: str, change: Change) -> Twist:
    """The answer of ``rpc`` is changed."""

    def twist(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
        answer = proceed(request)
        if called != rpc:
            return answer
        changed = change(request, answer)
        return answer if changed is None else changed

    return twist


def before(rpc: str, change: Callable[[Any], Any]) -> Twist:
    """What ``rpc`` is asked is changed, or refused."""

    def twist(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
        if called == rpc:
            change(request)
        return proceed(request)

    return twist


def refusing(rpc: str, when: Callable[[Any], object], code: grpc.StatusCode = Code.INTERNAL) -> Twist:
    """``rpc`` is refused for some requests that it should answer."""

    def change(request: Any) -> None:
        if when(request):
            raise Refused(code, "no")

    return before(rpc, change)


def put(rpc: str, **values: Any) -> Twist:
    """Fields of the answer have other values."""

    def change(request: Any, answer: Any) -> None:
        for name, value in values.items():
            setattr(answer, name, value)

    return after(rpc, change)


def never_refuses(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
    """Whatever should be refused is answered with an empty message."""
    try:
        return proceed(request)
    except Refused:
        rpcs = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
        return getattr(pb, rpcs[called].output_type.name)() if called in rpcs else probes.HealthCheckResponse()


def refuses_as(code: grpc.StatusCode | None, text: str | None) -> Twist:
    """Refusals have another status, or another text."""

    def twist(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
        try:
            return proceed(request)
        except Refused as refused:
            raise Refused(code or refused.code, refused.text if text is None else text) from None

    return twist


# --- inference ------------------------------------------------------------------------------------------------------


def _corrupt(name: str) -> Change:
    """The values of one output are other ones, of the same size where it has one."""

    def change(request: Any, answer: Any) -> None:
        for at, output in enumerate(answer.outputs):
            if output.name == name:
                raw = answer.raw_output_contents[at]
                answer.raw_output_contents[at] = raw[:-1] if name == "y_BYTES" else bytes(x ^ 1 for x in raw)

    return change


def _cut(name: str) -> Change:
    def change(request: Any, answer: Any) -> None:
        for at, output in enumerate(answer.outputs):
            if output.name == name:
                answer.raw_output_contents[at] = answer.raw_output_contents[at][:-1]

    return change


def _only_typed(change: Change) -> Change:
    return lambda request, answer: None if request.raw_input_contents else change(request, answer)


def _drop_output(request: Any, answer: Any) -> None:
    if len(answer.outputs) > 1 and not request.outputs:
        del answer.outputs[-1], answer.raw_output_contents[-1]


def _typed_answer(request: Any, answer: Any) -> None:
    if request.model_name == "echo":
        answer.outputs[0].contents.fp32_contents.extend([1.0] * 4)
        del answer.raw_output_contents[:]


def _swap(request: Any, answer: Any) -> None:
    raw = answer.raw_output_contents
    if len(request.outputs) > 2:
        raw[0], raw[1] = raw[1], raw[0]


def _twice(request: Any, answer: Any) -> None:
    if len(request.outputs) == 2:
        answer.outputs.add().CopyFrom(answer.outputs[0])
        answer.raw_output_contents.append(answer.raw_output_contents[0])


def _zero_batches(request: Any, answer: Any) -> None:
    if request.inputs[0].shape[0] > 1:
        answer.raw_output_contents[0] = bytes(len(answer.raw_output_contents[0]))


def _last_ids() -> Twist:
    """The id of the request before."""
    last = ["0"]

    def change(request: Any, answer: Any) -> None:
        answer.id, last[0] = last[0], answer.id

    return after("ModelInfer", change)


def _shape(request: Any, answer: Any) -> None:
    answer.outputs[0].shape[:] = [1, 5]


def _id_made_up(request: Any, answer: Any) -> None:
    answer.id = answer.id or "made up"


def _short_id(request: Any, answer: Any) -> None:
    answer.id = answer.id[:1_000_000]


def _accept_dimensions(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
    many = called == "ModelInfer" and any(len(tensor.shape) > 1000 for tensor in request.inputs)
    return pb.ModelInferResponse() if many else proceed(request)


def dying(when: Callable[[Any], object]) -> Twist:
    """Not live any more after a request."""
    dead = []

    def twist(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
        if called == "ModelInfer" and when(request):
            dead.append(1)
        if called == "ServerLive" and dead:
            return pb.ServerLiveResponse(live=False)
        return proceed(request)

    return twist


def _clear_outputs(request: Any) -> None:
    del request.outputs[:]


INFERENCE: Mapping[str, tuple[Twist, tuple[str, ...]]] = {
    "not live": (put("ServerLive", live=False), ("server.live",)),
    "not ready": (put("ServerReady", ready=False), ("server.ready",)),
    "no version": (put("ServerMetadata", version=""), ("server.metadata",)),
    "an extension without its RPC": (
        refusing("TraceSetting", lambda r: True, Code.UNIMPLEMENTED), ("server.extensions",)),
    "unknown fields refused": (
        refusing("ModelInfer", lambda r: len(UnknownFieldSet(r)), Code.INVALID_ARGUMENT), ("server.unknown-fields",)),
    "a shape that is not promised": (after("ModelInfer", _shape), ("infer.answered",)),
    "an output left out": (after("ModelInfer", _drop_output), ("infer.all-outputs",)),
    "typed answers": (after("ModelInfer", _typed_answer), ("infer.raw-outputs",)),
    "another version than there is": (put("ModelInfer", model_version="9"), ("infer.version",)),
    "always the newest version": (put("ModelInfer", model_version="3"), ("infer.each-version",)),
    "no id": (put("ModelInfer", id=""), ("infer.id", "stream.in-order")),
    "an id made up": (after("ModelInfer", _id_made_up), ("infer.no-id",)),
    "all outputs whichever are asked for": (before("ModelInfer", _clear_outputs), ("infer.one-output",)),
    "contents in another order": (after("ModelInfer", _swap), ("infer.some-outputs",)),
    "an output twice": (after("ModelInfer", _twice), ("infer.same-output-twice",)),
    "typed data misread": (after("ModelInfer", _only_typed(_corrupt("y_FP32"))), ("infer.typed",)),
    "batches mixed up": (after("ModelInfer", _zero_batches), ("infer.batch",)),
    "no rows, no answer": (refusing("ModelInfer", lambda r: 0 in r.inputs[0].shape), ("infer.no-rows",)),
    "optional inputs needed": (
        refusing("ModelInfer", lambda r: r.model_name == "maybe" and len(r.inputs) < 2), ("infer.optional-input",)),
    "answers to others": (_last_ids(), ("infer.side-by-side",)),
    "parameters refused": (
        refusing("ModelInfer", lambda r: "conformance_parameter" in r.parameters), ("parameters.unknown",)),
    "parameters of tensors refused": (
        refusing("ModelInfer", lambda r: any("conformance_parameter" in i.parameters for i in r.inputs)),
        ("parameters.unknown-of-tensors",)),
    "timeouts refused": (refusing("ModelInfer", lambda r: "timeout" in r.parameters), ("parameters.timeout",)),
    "priorities refused": (refusing("ModelInfer", lambda r: "priority" in r.parameters), ("parameters.priority",)),
    "sequences an accident": (
        refusing("ModelInfer", lambda r: "sequence_id" in r.parameters), ("parameters.sequence-of-stateless",)),
    "an id cut short": (after("ModelInfer", _short_id), ("call.large-id",)),
    "any rank": (_accept_dimensions, ("call.many-dimensions",)),
    "dying of many inputs": (dying(lambda r: len(r.inputs) > 5000), ("call.many-inputs",)),
    "dying of a long name": (dying(lambda r: len(r.model_name) > 5000), ("call.long-model-name",)),
}  # fmt: skip

RAW = {
    f"{name} cut short": (after("ModelInfer", _cut(f"y_{name}")), (f"datatype.{name}.raw",))
    for name in DATATYPES
}  # fmt: skip
TYPED = {
    f"typed {name} misread": (after("ModelInfer", _only_typed(_corrupt(f"y_{name}"))), (f"datatype.{name}.typed",))
    for name, kind in DATATYPES.items()
    if kind.field
}
