"""Edits of bytes accept what an earlier edit has left, even if it is empty."""

from random import Random

import pytest
from fuzzing import bytewise


@pytest.mark.parametrize("edit", bytewise.EDITS)
def test_an_edit_changes_bytes_and_the_seed_decides_how(edit: bytewise.Edit) -> None:
    content = bytes(range(256)) * 4
    found = [edit(content, Random(seed)) for seed in range(50)]
    assert found == [edit(content, Random(seed)) for seed in range(50)]
    assert sum(each != content for each in found) >= 45
    assert len(set(found)) >= 40 or edit is bytewise.append
    assert all(isinstance(edit(b"", Random(seed)), bytes) for seed in range(50))
