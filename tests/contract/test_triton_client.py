"""An unmodified tritonclient in a process that also has our stubs: tensors, streams, metadata, statistics."""

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import bf16kit

X = np.array([[1.5, -2.0, 0.25, 3.0]], np.float32)


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with triton.InferenceServerClient(address) as client:
        yield client


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str) -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def types_inputs(x: Any = None, rows: int = 1) -> list[Any]:
    return [
        x if x is not None else tensor("x", np.repeat(X, rows, 0), "FP32"),
        tensor("small", np.tile(np.arange(4, dtype=np.int32), (rows, 1)), "INT32"),
        tensor("large", np.tile(np.arange(4, dtype=np.int64) << 40, (rows, 1)), "INT64"),
        tensor("flag", np.tile(np.array([True, False, True, True]), (rows, 1)), "BOOL"),
    ]


def refusal(call: Any) -> InferenceServerException:
    with pytest.raises(InferenceServerException) as refused:
        call()
    return refused.value


def test_fp32_int32_int64_and_bool_inputs_and_outputs_are_transferred(client: Any) -> None:
    result = client.infer("types", types_inputs(rows=2), request_id="r-1")
    np.testing.assert_array_equal(result.as_numpy("doubled"), np.repeat(2 * X, 2, 0))
    np.testing.assert_array_equal(result.as_numpy("negated"), np.tile(-np.arange(4, dtype=np.int32), (2, 1)))
    np.testing.assert_array_equal(result.as_numpy("opposite"), np.tile(-(np.arange(4) << 40), (2, 1)))
    np.testing.assert_array_equal(result.as_numpy("denied"), np.tile([False, True, False, False], (2, 1)))
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("types", "1", "r-1")
    empty = client.infer("types", types_inputs(tensor("x", X[:0], "FP32"), rows=0))
    assert empty.as_numpy("doubled").shape == (0, 4)


def test_an_fp32_input_may_be_sent_as_fp16_or_bf16(client: Any) -> None:
    """An output may be bf16, too, at half the bytes."""
    for half in (tensor("x", X.astype(np.float16), "FP16"), tensor("x", X.astype(ml_dtypes.bfloat16), "BF16")):
        np.testing.assert_array_equal(client.infer("types", types_inputs(half)).as_numpy("doubled"), 2 * X)
    output = triton.InferRequestedOutput("doubled")
    output._get_tensor().parameters["datatype"].string_param = "BF16"  # noqa: SLF001 -- has no public way
    result = client.infer("types", types_inputs(), outputs=[output])
    assert result.get_output("doubled").datatype == "BF16"
    assert len(result.get_response().raw_output_contents[0]) == 8
    np.testing.assert_array_equal(result.as_numpy("doubled").astype(np.float32), 2 * X)


def test_asynchronous_requests_get_responses(client: Any) -> None:
    done: SimpleQueue[Any] = SimpleQueue()
    for _ in range(8):
        client.async_infer("types", types_inputs(), callback=lambda result, error: done.put((result, error)))
    for _ in range(8):
        result, error = done.get(timeout=60)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("doubled"), 2 * X)


def test_metadata_and_config_read_as_perf_analyzer_reads_them(client: Any) -> None:
    server = client.get_server_metadata(as_json=True)
    assert (server["name"], server["version"]) == ("bf16kit", bf16kit.__version__)
    assert "statistics" in server["extensions"]
    metadata = client.get_model_metadata("mlp", as_json=True)
    assert metadata["versions"] == ["1", "3"]
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "16"]}]
    config = client.get_model_config("mlp", as_json=True)["config"]
    assert config["max_batch_size"] == 8
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": ["16"]}]
    running = {name: value.get("string_value", "") for name, value in config["parameters"].items()}
    assert (running["active_precision"], running["active_precision_reason"]) == ("bf16", "")
    assert "sequence_batching" not in config
    assert "ensemble_scheduling" not in config


def test_an_input_that_the_model_cannot_run_on_is_the_clients_error(client: Any) -> None:
    """For an id beyond the table, ONNX Runtime's message names nodes and its own sources; the response must not."""
    ids = tensor("ids", np.array([[10_000]], np.int64), "INT64")
    refused = refusal(lambda: client.infer("lookup", [ids]))
    assert refused.status() == "StatusCode.INVALID_ARGUMENT"
    assert "cannot run on these inputs: indices element out of data bounds, idx=10000" in refused.message()
    assert "Gather" not in refused.message()
    assert "/" not in refused.message()


def test_any_client_can_read_log_settings_but_changes_must_be_enabled(client: Any) -> None:
    before = client.get_log_settings(as_json=True)["settings"]
    assert before["log_info"] == {"bool_param": True}
    assert before["log_verbose_level"] == {"uint32_param": 0}
    assert before["log_format"] == {"string_param": "ISO8601"}
    refused = refusal(lambda: client.update_log_settings({"log_verbose_level": 1}))
    assert refused.status() == "StatusCode.UNIMPLEMENTED"
    assert "start with --model-control explicit" in str(refused)
    assert client.get_log_settings(as_json=True)["settings"] == before
    assert {"logging", "trace"} <= set(client.get_server_metadata().extensions)


def test_any_client_can_read_trace_settings_and_tracing_is_off(client: Any) -> None:
    of_server = client.get_trace_settings(as_json=True)["settings"]
    assert (of_server["trace_level"], of_server["trace_mode"]) == ({"value": ["OFF"]}, {"value": ["opentelemetry"]})
    assert client.get_trace_settings("mlp", as_json=True)["settings"] == of_server
    assert refusal(lambda: client.get_trace_settings("nobody")).status() == "StatusCode.NOT_FOUND"
    refused = refusal(lambda: client.update_trace_settings("mlp", {"trace_rate": "1"}))
    assert refused.status() == "StatusCode.UNIMPLEMENTED"
