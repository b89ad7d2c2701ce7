"""Faults in a server's metadata, streams and extensions, one at a time, and the checks that detect each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from oipextensions import Refused
from oipserver import Twist
from twists import after, before, dying, put, refusing

from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.protocol import probes_pb2 as probes

Code = grpc.StatusCode


def _not_ready_is_an_error(request: Any, answer: Any) -> None:
    if not answer.ready:
        raise Refused(Code.NOT_FOUND, "unknown")


def _bad_shape(request: Any, answer: Any) -> None:
    answer.inputs[0].shape[0] = -2


def _no_versions(request: Any, answer: Any) -> None:
    if request.version:
        del answer.versions[:]


def _other_datatype(request: Any, answer: Any) -> None:
    answer.config.input[0].data_type = pb.TYPE_INT8


def _batch_in_dims(request: Any, answer: Any) -> None:
    answer.config.input[0].dims.insert(0, -1)


# --- streams ----------------------------------------------------------------------------------------------------------


def _reversed(requests: Any, answers: Any) -> Any:
    return answers[::-1]


def _greeting(requests: Any, answers: Any) -> Any:
    return answers or [pb.ModelStreamInferResponse()]


def _ends_at_error(requests: Any, answers: Any) -> Any:
    bad = next((at for at, answer in enumerate(answers) if answer.error_message), len(answers))
    return answers[: bad + 1]


def _no_error_ids(requests: Any, answers: Any) -> None:
    for answer in answers:
        if answer.error_message:
            answer.infer_response.id = ""


def _all_or_nothing(requests: Any, answers: Any) -> None:
    if any(answer.error_message for answer in answers):
        raise Refused(Code.NOT_FOUND, "one of them failed")


def _no_final(requests: Any, answers: Any) -> None:
    for answer in answers:
        answer.infer_response.parameters.clear()


def _error_said(requests: Any, answers: Any) -> None:
    for answer in answers:
        answer.error_message = "?"


# --- statistics -------------------------------------------------------------------------------------------------------


def _each(change: Callable[[Any], None]) -> Twist:
    def all_of_them(request: Any, answer: Any) -> None:
        for seen in answer.model_stats:
            change(seen)

    return after("ModelStatistics", all_of_them)


def _double(seen: Any) -> None:
    seen.inference_stats.success.count *= 2


def _requests_for_rows(seen: Any) -> None:
    seen.inference_count = seen.inference_stats.success.count


def _in_seconds(seen: Any) -> None:
    seen.last_inference //= 1000


def _no_batches(seen: Any) -> None:
    del seen.batch_stats[:]


def _counts_refusals() -> Twist:
    refused = [0]

    def twist(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
        try:
            answer = proceed(request)
        except Refused:
            refused[0] += called == "ModelInfer"
            raise
        if called == "ModelStatistics" and answer.model_stats:
            answer.model_stats[0].inference_stats.success.count += refused[0]
        return answer

    return twist


def _newest_alone(request: Any, answer: Any) -> Any:
    return pb.ModelStatisticsResponse(model_stats=answer.model_stats[-1:])


# --- classification ---------------------------------------------------------------------------------------------------


def _classified(change: Callable[[Any, Any], None]) -> Twist:
    def when_asked(request: Any, answer: Any) -> None:
        if any("classification" in output.parameters for output in request.outputs):
            change(request, answer)

    return after("ModelInfer", when_asked)


def _index_first(request: Any, answer: Any) -> None:
    answer.raw_output_contents[0] = answer.raw_output_contents[0].replace(b":", b";")


def _worst_first(request: Any, answer: Any) -> None:
    raw = answer.raw_output_contents[0]
    size = len(raw) // max(answer.outputs[0].shape[-1], 1)
    answer.raw_output_contents[0] = b"".join(raw[at : at + size] for at in range(len(raw) - size, -1, -size))


def _flat(request: Any, answer: Any) -> None:
    answer.outputs[0].shape[:] = [answer.outputs[0].shape[0] * answer.outputs[0].shape[-1], 1, 1]


def _one_too_few(request: Any, answer: Any) -> None:
    shape = answer.outputs[0].shape
    if shape[-1] == 4:
        answer.raw_output_contents[0] = answer.raw_output_contents[0][: -len(answer.raw_output_contents[0]) // 4]
        shape[-1] = 3


# --- shared memory ----------------------------------------------------------------------------------------------------


def _no_offset(request: Any, answer: Any) -> None:
    for region in answer.regions.values():
        region.offset = 0


def _one_alone(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
    if called == "SystemSharedMemoryUnregister" and not request.name:
        return pb.SystemSharedMemoryUnregisterResponse()
    return proceed(request)


def _kept(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
    """Ignore every unregistration, so that no region is ever removed."""
    if called == "SystemSharedMemoryUnregister":
        return pb.SystemSharedMemoryUnregisterResponse()
    return proceed(request)


def _unknown_region() -> Twist:
    known: set[str] = set()

    def twist(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
        if called == "SystemSharedMemoryRegister":
            known.add(request.name)
        if called == "SystemSharedMemoryUnregister" and request.name not in known:
            raise Refused(Code.NOT_FOUND, "no such region")
        return proceed(request)

    return twist


def _offset_ignored(request: Any) -> None:
    for tensor in request.inputs:
        if "shared_memory_offset" in tensor.parameters:
            del tensor.parameters["shared_memory_offset"]


def _sent_as_well(request: Any, answer: Any) -> None:
    for at, output in enumerate(request.outputs):
        if "shared_memory_region" in output.parameters:
            answer.raw_output_contents[at] = b"\0" * 16


def _larger_refused(request: Any) -> bool:
    return any(output.parameters["shared_memory_byte_size"].int64_param > 16 for output in request.outputs
               if "shared_memory_region" in output.parameters)  # fmt: skip


def _used_twice() -> Callable[[Any], bool]:
    """Return a predicate that is true for a request if an earlier request used the same region."""
    seen: set[str] = set()

    def again(request: Any) -> bool:
        name = request.inputs[0].parameters["shared_memory_region"].string_param
        known = name in seen
        seen.add(name or "-")
        return known

    return again


def _read_once() -> Twist:
    """Return a twist that repeats its first response to an identical request, even if the region has changed since."""
    seen: dict[bytes, Any] = {}

    def twist(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
        if called != "ModelInfer" or not any("shared_memory_region" in t.parameters for t in request.inputs):
            return proceed(request)
        return seen.setdefault(request.SerializeToString(deterministic=True), proceed(request))

    return twist


# --- settings, probes, the repository ---------------------------------------------------------------------------------


def _no_rate(request: Any, answer: Any) -> None:
    del answer.settings["trace_rate"]


def _another_changed(request: Any, answer: Any) -> None:
    if request.settings:
        answer.settings["log_frequency"].value[:] = ["7"]


def _everywhere(request: Any) -> None:
    request.model_name = ""


def _a_string(request: Any, answer: Any) -> None:
    answer.settings["log_info"].string_param = "true"


def _not_changed(request: Any) -> None:
    request.settings.clear()


def _renamed(requests: Any, answers: Any) -> None:
    answers[0].list_services_response.service[0].name = "other.Service"


def _not_serving(request: Any, answers: Any) -> None:
    answers[0].status = probes.HealthCheckResponse.NOT_SERVING


def _without_service(request: Any) -> bool:
    return bool(request.service)


def _state(request: Any, answer: Any) -> None:
    for model in answer.models:
        model.state = "State.READY"


def _first_alone(request: Any, answer: Any) -> Any:
    return pb.RepositoryIndexResponse(models=answer.models[:1])


def _does_nothing(rpc: str, answer: Any) -> Twist:
    return lambda called, request, proceed: answer if called == rpc else proceed(request)


def _away_while_loading() -> Twist:
    """Return a twist that rejects the first inference request after a load, as if the model were still loading."""
    away = []

    def twist(called: str, request: Any, proceed: Callable[[Any], Any]) -> Any:
        if called == "RepositoryModelLoad":
            away.append(1)
        if called == "ModelInfer" and away:
            away.clear()
            raise Refused(Code.UNAVAILABLE, "it is loading")
        return proceed(request)

    return twist


EXTENSIONS: Mapping[str, tuple[Twist, tuple[str, ...]]] = {
    "a model not ready": (put("ModelReady", ready=False), ("model.ready",)),
    "unknown is an error": (after("ModelReady", _not_ready_is_an_error), ("model.ready-unknown",)),
    "a size of -2": (after("ModelMetadata", _bad_shape), ("model.metadata",)),
    "no versions": (after("ModelMetadata", _no_versions), ("model.versions",)),
    "another datatype": (after("ModelConfig", _other_datatype), ("config.agrees",)),
    "the batch in dims": (after("ModelConfig", _batch_in_dims), ("config.batch-dimension",)),
    "an error with every answer": (after("ModelStreamInfer", _error_said), ("stream.answers",)),
    "answers in another order": (after("ModelStreamInfer", _reversed), ("stream.in-order",)),
    "a greeting": (after("ModelStreamInfer", _greeting), ("stream.nothing-sent",)),
    "the end at an error": (after("ModelStreamInfer", _ends_at_error), ("stream.error-message",)),
    "errors of nobody": (after("ModelStreamInfer", _no_error_ids), ("stream.error-id",)),
    "all or nothing": (after("ModelStreamInfer", _all_or_nothing), ("stream.grpc-error", "stream.error-message")),
    "no final response": (after("ModelStreamInfer", _no_final), ("stream.final-response",)),
    "counted twice": (_each(_double), ("statistics.success",)),
    "requests for rows": (_each(_requests_for_rows), ("statistics.rows",)),
    "refusals counted": (_counts_refusals(), ("statistics.refused",)),
    "seconds": (_each(_in_seconds), ("statistics.last-inference",)),
    "no batches": (_each(_no_batches), ("statistics.batches",)),
    "one version's statistics": (
        after("ModelStatistics", _newest_alone), ("statistics.versions", "statistics.all-models")),
    "another separator": (_classified(_index_first), ("classification.format",)),
    "the lowest first": (_classified(_worst_first), ("classification.format",)),
    "classes of another rank": (_classified(_flat), ("classification.count", "classification.rows")),
    "a class too few": (_classified(_one_too_few), ("classification.more-than-there-are",)),
    "dying of strings": (
        dying(lambda r: r.outputs and r.outputs[0].name == "y_BYTES" and "classification" in r.outputs[0].parameters),
        ("danger.classes-of-strings",)),
    "dying of a lost region": (dying(_used_twice()), ("danger.region-shrunk",)),
    "no offset": (after("SystemSharedMemoryStatus", _no_offset), ("memory.register",)),
    "all are none": (_one_alone, ("memory.unregister-all",)),
    "never forgotten": (_kept, ("memory.unregister",)),
    "unknown regions an error": (_unknown_region(), ("memory.unregister-unknown",)),
    "offsets ignored": (before("ModelInfer", _offset_ignored), ("memory.input",)),
    "outputs sent as well": (after("ModelInfer", _sent_as_well), ("memory.output",)),
    "room to spare refused": (refusing("ModelInfer", _larger_refused), ("memory.larger-output",)),
    "memory read once": (_read_once(), ("memory.memory-read-anew",)),
    "CUDA refused": (refusing("CudaSharedMemoryUnregister", lambda r: True), ("memory.cuda-none",)),
    "no rate": (after("TraceSetting", _no_rate), ("trace.settings",)),
    "another setting changed": (after("TraceSetting", _another_changed), ("trace.change",)),
    "a model's settings everybody's": (before("TraceSetting", _everywhere), ("trace.of-model",)),
    "a bool as a string": (after("LogSettings", _a_string), ("log.settings",)),
    "log settings not changed": (before("LogSettings", _not_changed), ("log.change",)),
    "not serving": (put("Check", status=probes.HealthCheckResponse.NOT_SERVING), ("health.check", "health.service")),
    "watched and not serving": (after("Watch", _not_serving), ("health.watch",)),
    "other services": (after("ServerReflectionInfo", _renamed), ("reflection.services",)),
    "a state of its own": (after("RepositoryIndex", _state), ("index.models", "index.ready")),
    "one model alone": (after("RepositoryIndex", _first_alone), ("index.models",)),
    "not unloaded": (_does_nothing("RepositoryModelUnload", pb.RepositoryModelUnloadResponse()), ("control.unload",)),
    "not loaded": (_does_nothing("RepositoryModelLoad", pb.RepositoryModelLoadResponse()), ("control.load",)),
    "away while it loads": (_away_while_loading(), ("control.reload",)),
    "unloaded once": (refusing("RepositoryModelUnload", lambda r: r.model_name != "typed"), ("control.unload-twice",)),
}  # fmt: skip
