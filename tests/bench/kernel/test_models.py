"""The converter accepts what the benchmarks ask of it; `make test-weekly` runs all of each benchmark."""

from pathlib import Path

import pytest

from bench.core.workspace import Workspace
from bench.kernel import models
from bf16kit.artifact.artifact import Artifact


@pytest.mark.long
def test_the_layers_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "WIDTH", 64)
    _, artifact = models.layers(Workspace(tmp_path))
    assert {"cpu", "cpu-bf16"} <= Artifact.open(artifact).manifest.profiles.keys()
