"""The manifest's fields for one stored tensor must fit together; otherwise they are rejected with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bf16kit.artifact.entries import TensorEntry

MATRIX = TensorEntry(name="w", dtype="bfloat16", shape=[2, 3], file="weights.bf16", offset=64, bytes=12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes": 13}, "13 bytes do not hold bfloat16"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'"),
        ({"dtype": "string", "bytes": 48}, "do not hold string"),
        ({"shape": [2, -3]}, "greater than or equal to 0"),
        ({"scale": "s"}, "belong together"),
        ({"scale": "s", "scale_axis": 2}, "not an axis"),
        (
            {"panels": 2},
            r"tensor 'w': panels 2 of bfloat16\[2, 3\]; panels lie along axis 0 or 1 of a bfloat16 matrix",
        ),
        ({"panels": -1}, "panels -1 of bfloat16"),
        ({"panels": 0, "shape": [6]}, r"panels 0 of bfloat16\[6\]"),
        ({"panels": 0, "shape": [1, 2, 3]}, r"panels 0 of bfloat16\[1, 2, 3\]"),
        ({"panels": 1, "dtype": "float16"}, r"panels 1 of float16\[2, 3\]"),
        ({"panels": 1.5}, "valid integer"),
    ],
)
def test_fields_that_do_not_fit_together_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TensorEntry(**(MATRIX.model_dump() | changes))


def test_the_field_panels_is_written_only_if_it_is_set() -> None:
    """A tensor without panels is written as in version 1 of the format."""
    assert "panels" not in MATRIX.model_dump()
    assert TensorEntry(**(MATRIX.model_dump() | {"panels": 1})).model_dump()["panels"] == 1
