"""Edits of bytes take what an edit before them has left, were it nothing."""

from __future__ import annotations

from random import Random

import pytest
from fuzzing import bytewise


@pytest.mark.parametrize("edit", bytewise.EDITS)
def test_nothing_can_be_edited_too(edit: bytewise.Edit) -> None:
    for seed in range(50):
        edit(b"", Random(seed))
