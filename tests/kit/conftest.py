"""Fixtures for tests of the kit."""

from __future__ import annotations

from pathlib import Path

import pytest
from small import publish_small

from bf16kit.artifact.artifact import Artifact


@pytest.fixture
def small_artifact(tmp_path: Path) -> Artifact:
    """Return the small artifact, published at ``tmp_path/small/1``."""
    return publish_small(tmp_path / "small" / "1")
