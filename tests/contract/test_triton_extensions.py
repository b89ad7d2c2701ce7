"""Triton's extensions, used by an unmodified tritonclient: classes, strings, priorities, timeouts."""

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from artifacts import write_mlp, write_words
from inprocess import running
from tritonclient.utils import InferenceServerException

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("extensions")
    write_words(root / "words" / "1")
    write_mlp(root / "classes" / "1", logits=True)
    (root / "classes" / "labels.txt").write_text("tabby\ntiger cat\n")
    (root / "classes" / "serving.yaml").write_text("labels: {y: labels.txt}\n")
    with running(root, "words", "classes") as address, triton.InferenceServerClient(address) as client:
        yield client


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str) -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


@pytest.mark.long
def test_classes_of_an_output_are_returned_with_their_labels(client: Any) -> None:
    x = tensor("x", X, "FP32")
    values = client.infer("classes", [x]).as_numpy("y")
    answer = client.infer("classes", [x], outputs=[triton.InferRequestedOutput("y", class_count=16)])
    classes = answer.as_numpy("y")
    assert (answer.get_output("y").datatype, classes.shape) == ("BYTES", (2, 16))
    for row, expected in zip(classes, values, strict=True):
        parts = [entry.decode().split(":") for entry in row]
        assert [int(part[1]) for part in parts] == np.argsort(-expected, kind="stable").tolist()
        np.testing.assert_allclose([float(part[0]) for part in parts], np.sort(expected)[::-1], atol=1e-6)
        labels = {int(part[1]): part[2:] for part in parts}
        assert labels.pop(0) == ["tabby"]
        assert labels.pop(1) == ["tiger cat"]
        assert set(map(len, labels.values())) == {0}
    best = client.infer("classes", [x], outputs=[triton.InferRequestedOutput("y", class_count=1)]).as_numpy("y")
    np.testing.assert_array_equal(best, classes[:, :1])


def test_any_utf_8_string_is_kept_and_other_bytes_are_rejected(client: Any) -> None:
    texts = np.array([["", "h\0e"], ["zażółć", "x" * 70_000]], object)
    numbers = tensor("FP32", np.ones((2, 2), np.float32), "FP32")
    same = client.infer("words", [tensor("BYTES", texts, "BYTES"), numbers]).as_numpy("BYTES.out")
    assert [text.decode() for text in same.ravel()] == texts.ravel().tolist()
    wrong = tensor("BYTES", np.array([[b"\xff"] * 2] * 2, object), "BYTES")
    with pytest.raises(InferenceServerException, match="input 'BYTES' holds BYTES that are not UTF-8") as refused:
        client.infer("words", [wrong, numbers])
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_timeout_in_microseconds_ends_a_request_before_it_runs(client: Any) -> None:
    x = tensor("x", X, "FP32")
    client.infer("classes", [x], timeout=60_000_000)
    with pytest.raises(InferenceServerException, match="deadline") as refused:
        client.infer("classes", [x], timeout=1)
    assert refused.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_a_stream_marks_the_last_response_of_a_request_if_requested(client: Any) -> None:
    done: SimpleQueue[Any] = SimpleQueue()
    client.start_stream(callback=lambda result, error: done.put((result, error)))
    for wanted in (False, True):
        client.async_stream_infer("classes", [tensor("x", X, "FP32")], enable_empty_final_response=wanted)
    answers = [done.get(timeout=60)[0].get_response() for _ in range(2)]
    client.stop_stream()
    assert "triton_final_response" not in answers[0].parameters
    assert answers[1].parameters["triton_final_response"].bool_param
    assert [answer.parameters["precision"].string_param for answer in answers] == ["bf16", "bf16"]


def test_custom_parameters_headers_and_any_priority_are_accepted_and_the_extensions_declared(client: Any) -> None:
    mine = {"text": "value", "number": 3, "share": 0.5, "yes": True}
    x = tensor("x", X, "FP32")
    result = client.infer("classes", [x], parameters=mine, headers={"mine": "1"}, request_id="r", priority=7)
    assert result.get_response().id == "r"
    declared = set(client.get_server_metadata().extensions)
    assert {"classification", "schedule_policy", "parameters"} <= declared
    assert not {"sequence", "cuda_shared_memory", "system_shared_memory", "binary_tensor_data"} & declared
