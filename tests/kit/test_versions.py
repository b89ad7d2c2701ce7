from __future__ import annotations

import pytest

from bf16kit.system.versions import is_older


@pytest.mark.parametrize(
    ("version", "other"), [("1.9", "1.24"), ("1.24", "1.24.1"), ("1.30.9", "1.31.1"), ("1.31.1", "2.0.dev1")]
)
def test_versions_are_compared_as_numbers(version: str, other: str) -> None:
    assert is_older(version, other)
    assert not is_older(other, version)


def test_a_pre_release_counts_as_the_release() -> None:
    assert not is_older("1.40.0.dev20270101", "1.40.0")
    assert not is_older("1.24.0rc1", "1.24.0")
