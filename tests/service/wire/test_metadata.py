"""Metadata, configuration, statistics and index of the server and its models, as perf_analyzer and people read them."""

import pytest
from loopback import LoopbackModel, LoopbackRegistry

import bf16kit
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime import RuntimeInfo
from bf16kit.service.contract import ActivePrecision, BatchStatistics, Duration, StatisticsSnapshot
from bf16kit.service.operations import IndexEntry, RegistryModels
from bf16kit.service.wire.metadata import (
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)

IDS = TensorSpec("ids", "int64", ("batch", "seq"))
OUT = TensorSpec("out", "float32", ("batch", "seq", 384))


def test_the_server_gives_its_name_and_only_extensions_that_it_has() -> None:
    answer = server_metadata()
    assert (answer.name, answer.version) == ("bf16kit", bf16kit.__version__)
    assert "statistics" in answer.extensions  # perf_analyzer checks for it
    assert not any("shared_memory" in extension for extension in answer.extensions)


def test_free_dimensions_are_minus_one_and_properties_describe_how_the_model_runs() -> None:
    model = LoopbackModel("m", version=3, inputs=[IDS], outputs=[OUT])
    model.active_precision = ActivePrecision("fp32", "y is 1.4 times its budget")
    answer = model_metadata(model, [1, 3])
    assert (answer.name, list(answer.versions), answer.platform) == ("m", ["1", "3"], "onnxruntime_onnx")
    assert (answer.inputs[0].datatype, list(answer.inputs[0].shape)) == ("INT64", [-1, -1])
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("FP32", [-1, -1, 384])
    assert dict(answer.properties) == {
        "profile": "cpu",
        "precision": "bf16-weights",
        "accumulation": "fp32",
        "kernel": "",
        "device": "cpu",
        "note": "weights are widened as they are used",
        "choice": "",
        "golden": "golden samples within budget (y relative_l2 0.0017)",
        "active_precision": "fp32",
        "active_precision_reason": "y is 1.4 times its budget",
    }


def test_a_batched_models_dims_leave_the_batch_out() -> None:
    config = model_config(LoopbackModel(inputs=[IDS], outputs=[OUT], max_batch_size=8)).config
    assert config.max_batch_size == 8
    assert (list(config.input[0].dims), list(config.output[0].dims)) == ([-1], [-1, 384])
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert config.dynamic_batching.default_queue_policy.default_timeout_microseconds == 0, "no limit"
    assert config.version_policy.latest.num_versions == 1
    assert not config.model_transaction_policy.decoupled


@pytest.mark.parametrize(("axis", "size"), [(None, 0), (0, 0), (1, 8)])
def test_a_model_that_is_not_batched_along_the_first_dimension_keeps_its_dims(axis: int | None, size: int) -> None:
    config = model_config(LoopbackModel(inputs=[IDS], outputs=[OUT], batch_axis=axis, max_batch_size=size)).config
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [-1, -1]
    assert not config.HasField("dynamic_batching")


def test_an_input_that_may_be_an_image_has_its_format() -> None:
    shapes = {"NCHW": (3, 8, 9), "NHWC": (8, 9, 1), "NONE": (8, 9, 2)}
    model = LoopbackModel(inputs=[TensorSpec(name, "float32", ("batch", *dims)) for name, dims in shapes.items()])
    found = {spec.name: pb.ModelInput.Format.Name(spec.format) for spec in model_config(model).config.input}
    assert found == {name: f"FORMAT_{name}" for name in shapes}


def test_a_model_on_a_gpu_has_its_device_number() -> None:
    info = RuntimeInfo("torchscript", "cuda:1", "torchscript", "bf16", "fp32")
    config = model_config(LoopbackModel(info=info)).config
    assert (config.platform, config.backend) == ("pytorch_libtorch", "pytorch")
    assert config.instance_group[0].kind == pb.ModelInstanceGroup.KIND_GPU
    assert list(config.instance_group[0].gpus) == [1]


def test_statistics_are_carried_field_by_field() -> None:
    batch = BatchStatistics(4, Duration(1, 10), Duration(1, 20), Duration(1, 30))
    model = LoopbackModel("m")
    model.statistics = StatisticsSnapshot(
        last_inference_ms=123,
        inference_count=9,
        execution_count=5,
        success=Duration(4, 1),
        fail=Duration(1, 2),
        queue=Duration(4, 3),
        compute_input=Duration(4, 4),
        compute_infer=Duration(4, 5),
        compute_output=Duration(4, 6),
        batches=(batch,),
        weight_bytes=77,
    )
    (stats,) = model_statistics(RegistryModels(LoopbackRegistry([model])).statistics("", "")).model_stats
    assert (stats.name, stats.version, stats.last_inference) == ("m", "1", 123)
    assert (stats.inference_count, stats.execution_count) == (9, 5)
    durations = [(found.name, value.count, value.ns) for found, value in stats.inference_stats.ListFields()][:6]
    assert durations == [
        ("success", 4, 1), ("fail", 1, 2), ("queue", 4, 3),
        ("compute_input", 4, 4), ("compute_infer", 4, 5), ("compute_output", 4, 6),
    ]  # fmt: skip
    assert stats.inference_stats.HasField("cache_hit")
    assert (stats.batch_stats[0].batch_size, stats.batch_stats[0].compute_infer.ns) == (4, 20)
    assert (stats.memory_usage[0].type, stats.memory_usage[0].byte_size) == ("CPU", 77)


def test_the_index_gives_every_version_its_state_and_reason() -> None:
    loopback = [LoopbackModel("a"), LoopbackModel("b", state="loading"), LoopbackModel("c", state="unavailable")]
    models = [*RegistryModels(LoopbackRegistry(loopback)).index(), IndexEntry("d")]
    listed = [(m.name, m.version, m.state, m.reason) for m in repository_index(models, ready_only=False).models]
    assert listed == [
        ("a", "1", "READY", ""),
        ("b", "1", "LOADING", "it is loading"),
        ("c", "1", "UNAVAILABLE", "it is unavailable"),
        ("d", "", "", ""),
    ]
    assert [m.name for m in repository_index(models, ready_only=True).models] == ["a"]
