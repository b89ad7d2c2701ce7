"""Helpers for programs that call the server with another project's client. They run in that client's environment, so
this file imports only numpy, grpc and the standard library."""

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

#: The datatypes that have typed contents, and the numpy type of each.
TYPED: dict[str, Any] = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)  # for the model "mlp"


def of_every_datatype() -> dict[str, Any]:
    """Return two rows for the model "typed": an array for each input."""
    return {name: np.array([[0, 1], [1, 0]]).astype(dtype) for name, dtype in TYPED.items()}


@contextmanager
def refused(code: grpc.StatusCode, *expected_words: str) -> Iterator[None]:
    """Assert that a call in the block is rejected with this code and a message that contains each of these words."""
    try:
        yield
    except grpc.RpcError as error:
        details = error.details() or ""
        if error.code() is not code or not all(word in details for word in expected_words):
            raise AssertionError(f"expected {code} with {expected_words}, came {error.code()}: {details}") from None
        return
    raise AssertionError(f"expected {code}, came an answer")


class Report:
    """The outcome of each call, by the call's name: "" if it is as expected, otherwise a traceback."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        self._told[name] = ""
        try:
            yield
        except Exception:  # noqa: BLE001 -- whoever asked for the report judges
            self._told[name] = traceback.format_exc()

    def write(self) -> None:
        """Write the outcomes to the standard output as a JSON object on one line."""
        sys.stdout.write(json.dumps(self._told) + "\n")
