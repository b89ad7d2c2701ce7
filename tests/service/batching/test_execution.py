import numpy as np
import pytest

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.service.batching.execution import gather, requested_outputs, signature, split
from bf16kit.service.request import Request


def request(rows: int, outputs: tuple[str, ...] | None = None) -> Request:
    return Request({"x": np.zeros((rows, 2), np.float32)}, rows=rows, outputs=outputs)


def test_a_batch_axis_that_is_not_the_first_is_joined_and_split_too_and_a_single_request_is_not_copied() -> None:
    requests = [Request({"x": np.zeros((3, rows))}, rows=rows) for rows in (1, 2)]
    assert gather(requests, axis=1)["x"].shape == (3, 3)
    parts = split({"y": np.arange(9).reshape(3, 3)}, requests, axis=1)
    np.testing.assert_array_equal(parts[1]["y"], [[1, 2], [4, 5], [7, 8]])
    assert gather(requests[:1], axis=1) is requests[0].feeds


def test_each_request_gets_only_the_outputs_it_requested_in_its_order() -> None:
    requests = [request(1, ("b", "a")), request(1, ("c",))]
    assert requested_outputs(requests) == ("b", "a", "c")
    outputs = {name: np.zeros((2, 1)) for name in ("b", "a", "c")}
    assert [list(part) for part in split(outputs, requests, axis=0)] == [["b", "a"], ["c"]]
    assert requested_outputs([request(1, ("b",)), request(1, None)]) is None, "one of them wants all"


def test_an_output_with_the_wrong_number_of_rows_is_a_failure_of_the_model() -> None:
    with pytest.raises(RuntimeFailure):
        split({"y": np.zeros((1, 2))}, [request(1), request(2)], axis=0)


def test_requests_share_a_batch_only_with_equal_shapes_and_dtypes_apart_from_their_rows() -> None:
    base = signature({"a": np.zeros((1, 3)), "b": np.zeros(1)}, axis=0)
    assert base == signature({"b": np.zeros(7), "a": np.zeros((5, 3))}, axis=0)
    assert base != signature({"a": np.zeros((1, 4)), "b": np.zeros(1)}, axis=0)
    assert base != signature({"a": np.zeros((1, 3), np.float32), "b": np.zeros(1)}, axis=0)
