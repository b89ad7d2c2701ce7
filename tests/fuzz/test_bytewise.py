"""Edits of bytes accept what an earlier edit has left, even if it is empty."""

from __future__ import annotations

from random import Random

import pytest
from fuzzing import bytewise


@pytest.mark.parametrize("edit", bytewise.EDITS)
def test_empty_bytes_can_be_edited(edit: bytewise.Edit) -> None:
    for seed in range(50):
        edit(b"", Random(seed))
