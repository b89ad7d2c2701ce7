"""Responses that describe the server and its models: metadata, configuration, statistics and the repository's index."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import bf16kit
from bf16kit.numerics.tensors import BY_NAME, TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.contract import DURATIONS, PHASES, BatchStatistics, Model, QueueBounds, StatisticsSnapshot
from bf16kit.service.operations import IndexEntry, Region, VersionStatistics

SERVER_NAME = "bf16kit"
#: The extensions that are always on. perf_analyzer requires ``statistics``.
EXTENSIONS = ("classification", "model_configuration", "parameters", "schedule_policy", "statistics")

_ANY = -1
_PROPERTIES = ("profile", "precision", "accumulation", "kernel", "device", "note", "choice")  # of RuntimeInfo
_PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "torchscript": "pytorch_libtorch", "torchexport": "pytorch_export"}
_BACKENDS = {"onnxruntime": "onnxruntime", "torchscript": "pytorch", "torchexport": "pytorch"}


def server_metadata(extensions: Sequence[str] = ()) -> pb.ServerMetadataResponse:
    """Return the server's name, version and extensions: ``extensions`` in addition to those that are always on."""
    return pb.ServerMetadataResponse(
        name=SERVER_NAME, version=bf16kit.__version__, extensions=sorted({*EXTENSIONS, *extensions})
    )


def model_metadata(model: Model, versions: Iterable[int]) -> pb.ModelMetadataResponse:
    """Return names, datatypes and shapes (−1 = any size); ``properties`` describe how the model runs.

    ``versions`` are the ready ones, which a client can call.
    """
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=[str(v) for v in versions],
        platform=_PLATFORMS.get(model.info.backend, model.info.backend),
        inputs=[_tensor_metadata(spec) for spec in model.inputs],
        outputs=[_tensor_metadata(spec) for spec in model.outputs],
        properties=_properties(model),
    )


def model_config(model: Model) -> pb.ModelConfigResponse:
    """Return Triton's ``ModelConfig``. With a maximum batch size, ``dims`` leave out the batch dimension.

    Triton knows batches along the first dimension only, so a model with another batch axis is shown as unbatched.
    """
    batched = model.max_batch_size > 0 and model.batch_axis == 0
    axis = 0 if batched else None
    config = pb.ModelConfig(
        name=model.name,
        platform=_PLATFORMS.get(model.info.backend, model.info.backend),
        backend=_BACKENDS.get(model.info.backend, model.info.backend),
        max_batch_size=model.max_batch_size if batched else 0,
        input=[_model_input(spec, axis) for spec in model.inputs],
        output=[pb.ModelOutput(name=s.name, data_type=_data_type(s), dims=_dims(s, axis)) for s in model.outputs],
        instance_group=[_instance_group(model)],
        version_policy=_version_policy(model.scheduling.versions),
        parameters={key: pb.ModelParameter(string_value=value) for key, value in _properties(model).items()},
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=False),
    )
    if batched:
        config.dynamic_batching.CopyFrom(_dynamic_batching(model.scheduling.bounds, model.max_queue_delay_s))
    return pb.ModelConfigResponse(config=config)


def _version_policy(versions: int | tuple[int, ...] | None) -> pb.ModelVersionPolicy:
    policy = pb.ModelVersionPolicy
    if versions is None:
        return policy(all=policy.All())
    if isinstance(versions, int):
        return policy(latest=policy.Latest(num_versions=versions))
    return policy(specific=policy.Specific(versions=versions))


def _dynamic_batching(bounds: QueueBounds, delay_s: float) -> pb.ModelDynamicBatching:
    """Return the queue policy. Requests with a longer expected wait are rejected on arrival; 0 means no limit."""
    wait_us = 0 if bounds.max_wait_s == math.inf else round(bounds.max_wait_s * 1e6)
    return pb.ModelDynamicBatching(
        max_queue_delay_microseconds=round(delay_s * 1e6),
        default_queue_policy=pb.ModelQueuePolicy(
            timeout_action=pb.ModelQueuePolicy.REJECT,
            default_timeout_microseconds=wait_us,
            allow_timeout_override=True,
            max_queue_size=bounds.max_requests,
        ),
    )


def model_statistics(models: Iterable[VersionStatistics]) -> pb.ModelStatisticsResponse:
    """Return counts and durations of the ready models; the device of others is not known yet."""
    return pb.ModelStatisticsResponse(model_stats=[_statistics(model) for model in models])


def repository_index(lines: Iterable[IndexEntry], ready_only: bool) -> pb.RepositoryIndexResponse:
    """Return every version with its state and the reason for it, if there is one."""
    index = pb.RepositoryIndexResponse.ModelIndex
    return pb.RepositoryIndexResponse(
        models=[
            index(name=line.name, version=line.version, state=line.state, reason=line.reason)
            for line in lines
            if line.state == "READY" or not ready_only
        ]
    )


def regions_status(regions: Iterable[Region]) -> pb.SystemSharedMemoryStatusResponse:
    """Return the registered regions by name."""
    status = pb.SystemSharedMemoryStatusResponse.RegionStatus
    return pb.SystemSharedMemoryStatusResponse(
        regions={r.name: status(name=r.name, key=r.key, offset=r.offset, byte_size=r.byte_size) for r in regions}
    )


def _model_input(spec: TensorSpec, axis: int | None) -> pb.ModelInput:
    dims = _dims(spec, axis)
    return pb.ModelInput(name=spec.name, data_type=_data_type(spec), dims=dims, format=_image_format(dims))


def _image_format(dims: Sequence[int]) -> pb.ModelInput.Format:
    """Return the layout of an input that may be an image of one or three colours; Triton's image_client needs it."""
    if len(dims) != 3:
        return pb.ModelInput.FORMAT_NONE
    if dims[0] in (1, 3):
        return pb.ModelInput.FORMAT_NCHW
    return pb.ModelInput.FORMAT_NHWC if dims[2] in (1, 3) else pb.ModelInput.FORMAT_NONE


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=spec.name, datatype=BY_NAME[spec.dtype].oip, shape=_dims(spec, None)
    )


def _dims(spec: TensorSpec, without_axis: int | None) -> list[int]:
    sizes = [dim if isinstance(dim, int) else _ANY for dim in spec.shape]
    return [size for axis, size in enumerate(sizes) if axis != without_axis]


def _data_type(spec: TensorSpec) -> pb.DataType:
    oip = BY_NAME[spec.dtype].oip
    number = pb.DataType.Value("TYPE_STRING" if oip == "BYTES" else f"TYPE_{oip}")
    return cast(pb.DataType, number)  # in the stubs, the parameter is an enum, and Value() returns an int


def _instance_group(model: Model) -> pb.ModelInstanceGroup:
    device, _, index = model.info.device.partition(":")
    on_gpu = device == "cuda"
    return pb.ModelInstanceGroup(
        name=f"{model.name}_0",
        kind=pb.ModelInstanceGroup.KIND_GPU if on_gpu else pb.ModelInstanceGroup.KIND_CPU,
        count=model.instances,
        gpus=[int(index or 0)] if on_gpu else (),
    )


def _properties(model: Model) -> dict[str, str]:
    return {
        **{name: getattr(model.info, name) for name in _PROPERTIES},
        "golden": model.golden,
        "active_precision": model.active_precision.precision,
        "active_precision_reason": model.active_precision.reason,
    }


def _statistics(model: VersionStatistics) -> pb.ModelStatistics:
    snapshot = model.snapshot
    return pb.ModelStatistics(
        name=model.name,
        version=str(model.version),
        last_inference=snapshot.last_inference_ms,
        inference_count=snapshot.inference_count,
        execution_count=snapshot.execution_count,
        inference_stats=pb.InferStatistics(
            **_durations(snapshot, *DURATIONS),
            cache_hit=pb.StatisticDuration(),
            cache_miss=pb.StatisticDuration(),
        ),
        batch_stats=[
            pb.InferBatchStatistics(batch_size=batch.batch_size, **_durations(batch, *PHASES))
            for batch in snapshot.batches
        ],
        memory_usage=_memory(model),
    )


def _memory(model: VersionStatistics) -> Sequence[pb.MemoryUsage]:
    device, _, index = model.device.partition(":")
    kind, nbytes = "GPU" if device == "cuda" else "CPU", model.snapshot.weight_bytes
    return [pb.MemoryUsage(type=kind, id=int(index or 0), byte_size=nbytes)] if nbytes else ()


def _durations(snapshot: StatisticsSnapshot | BatchStatistics, *names: str) -> dict[str, pb.StatisticDuration]:
    found = {name: getattr(snapshot, name) for name in names}
    return {name: pb.StatisticDuration(count=duration.count, ns=duration.ns) for name, duration in found.items()}
