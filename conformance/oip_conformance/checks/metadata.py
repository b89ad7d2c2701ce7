"""Checks of readiness, metadata, versions and configuration of models, which must agree with each other."""

from __future__ import annotations

from oip_conformance.checks.sources import OBSERVED, OIP, extension
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Code, InvalidCall, Skipped, check, must, refusal
from oip_conformance.wire import DATATYPES

UNKNOWN_NAME = "conformance-no-such-model"
_CONFIG = extension("model_configuration")
_OF_TYPE = {pb.TYPE_STRING: "BYTES"}


@check("model.ready", MUST, OIP, "ModelReady: true if the model is ready; no version: the server chooses one.")
def model_ready(session: Session) -> None:
    for model in session.models:
        for version in ("", *model.metadata.versions):
            request = pb.ModelReadyRequest(name=model.name, version=version)
            response = session.target.call(request)
            must(response.ok and response.message.ready, "ready: true", response, request)


@check("model.ready-unknown", TRITON, OBSERVED, "ModelReady of an unknown model or version is false, not an error.")
def unknown_is_not_ready(session: Session) -> None:
    for name, version in ((UNKNOWN_NAME, ""), (session.model.name, "987654321")):
        request = pb.ModelReadyRequest(name=name, version=version)
        response = session.target.call(request)
        must(response.ok and not response.message.ready, "ready: false", response, request)


@check(
    "model.metadata",
    MUST,
    OIP,
    "ModelMetadata: the model's name and its tensors: names, datatypes, shapes (-1: variable).",
)
def metadata(session: Session) -> None:
    for model in session.models:
        reported = model.metadata
        must(reported.name == model.name, f"name {model.name!r}", repr(reported.name), model.name)
        for tensors in (reported.inputs, reported.outputs):
            names = [tensor.name for tensor in tensors]
            must(
                tensors and all(names) and len({*names}) == len(names), "tensors of different names", names, model.name
            )
            for tensor in tensors:
                must(tensor.datatype in DATATYPES, "a datatype of the protocol", repr(tensor.datatype), model.name)
                must(all(size >= -1 for size in tensor.shape), "sizes of -1 or more", list(tensor.shape), model.name)


@check("model.versions", MUST, OIP, "versions: the versions of the model available on the server.")
def versions(session: Session) -> None:
    for model in session.models:
        for version in model.metadata.versions:
            request = pb.ModelMetadataRequest(name=model.name, version=version)
            response = session.target.call(request)
            must(
                response.ok and version in response.message.versions,
                f"metadata of version {version}",
                response,
                request,
            )


metadata_unknown = refusal(
    "model.metadata-unknown", MUST, OIP, "ModelMetadata of an unknown model is an error.", [Code.NOT_FOUND],
    lambda session: InvalidCall(pb.ModelMetadataRequest(name=UNKNOWN_NAME), [UNKNOWN_NAME]),
)  # fmt: skip
metadata_unknown_version = refusal(
    "model.metadata-unknown-version", MUST, OIP, "ModelMetadata of an unknown version is an error.", [Code.NOT_FOUND],
    lambda session: InvalidCall(pb.ModelMetadataRequest(name=session.model.name, version="987654321"), ["987654321"]),
)  # fmt: skip
metadata_no_number = refusal(
    "model.metadata-bad-version", MUST, OIP, "ModelMetadata of a version that is not a number is an error.",
    [Code.INVALID_ARGUMENT, Code.NOT_FOUND],
    lambda session: InvalidCall(pb.ModelMetadataRequest(name=session.model.name, version="newest"), ["newest"]),
)  # fmt: skip


@check(
    "config.agrees",
    MUST,
    _CONFIG,
    "ModelConfig gives the model's configuration: its tensors are those of the metadata.",
    "model_configuration",
)
def config(session: Session) -> None:
    for model in session.models:
        must(
            model.config is not None and model.config.name == model.name,
            f"the configuration of {model.name!r}",
            model.config,
        )
        if model.config is None:
            raise Skipped("no configuration came")
        for configured, described in ((model.config.input, model.inputs), (model.config.output, model.outputs)):
            known = {tensor.name: tensor for tensor in configured}
            must({*known} == {tensor.name for tensor in described}, f"tensors {sorted(known)}", described, model.name)
            for tensor in described:
                kind = known[tensor.name].data_type
                name = _OF_TYPE.get(kind) or pb.DataType.Name(kind).removeprefix("TYPE_")
                must(name == tensor.datatype, f"{tensor.name!r} as {tensor.datatype}", name, model.name)


@check(
    "config.batch-dimension",
    TRITON,
    OBSERVED,
    "With max_batch_size > 0 the shapes of the metadata are -1 and then the configuration's dims; without it, the dims.",
    "model_configuration",
)
def batch_dimension(session: Session) -> None:
    for model in session.models:
        if model.config is None:
            continue
        ahead = [-1] if model.max_batch_size > 0 else []
        dims = {t.name: list(t.dims) for t in model.config.input} | {t.name: list(t.dims) for t in model.config.output}
        for tensor in (*model.inputs, *model.outputs):
            wanted = [*ahead, *dims.get(tensor.name, [])]
            must(list(tensor.shape) == wanted, f"{tensor.name!r} of {model.name!r} as {wanted}", list(tensor.shape))


config_unknown = refusal(
    "config.unknown", MUST, _CONFIG, "ModelConfig of an unknown model is an error.", [Code.NOT_FOUND],
    lambda session: InvalidCall(pb.ModelConfigRequest(name=UNKNOWN_NAME), [UNKNOWN_NAME]), "model_configuration",
)  # fmt: skip
config_unknown_version = refusal(
    "config.unknown-version", MUST, _CONFIG, "ModelConfig of an unknown version is an error.", [Code.NOT_FOUND],
    lambda session: InvalidCall(pb.ModelConfigRequest(name=session.model.name, version="987654321"), ["987654321"]),
    "model_configuration",
)  # fmt: skip
