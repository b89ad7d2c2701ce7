"""The layers of a profile: where its drift comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from converting import Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.measurements import LayerEntry
from bf16kit.messages.errors import ArtifactError
from converter.islands.explain import open_reference, trace
from converter.source import Feeds


def layers(artifact: Artifact, feeds: Sequence[Feeds], profile: str) -> list[LayerEntry]:
    """Return the layers of ``profile``, measured on ``feeds``."""
    with open_reference(artifact) as graph:
        return trace(graph, artifact, feeds, profile).layers()


def test_layers_are_the_sources_nodes_in_their_order(small: Artifact) -> None:
    """The cpu profile fuses a product, its bias and its activation, so both graphs have the last result alone."""
    found = layers(small, [small.golden().inputs], "cpu")
    assert [(layer.name, layer.op, layer.depth) for layer in found] == [("relu0", "Relu", 1), ("add1", "Add", 2)]
    assert [layer.name for layer in layers(small, [small.golden().inputs], "cuda")] == [
        *("matmul0", "add0", "relu0", "matmul1", "add1"),
    ]


@pytest.mark.parametrize("profile", ["cpu", "cpu-bf16", "cuda"])
def test_a_sound_model_is_on_the_expected_line(small: Artifact, profile: str) -> None:
    for layer in layers(small, [small.golden().inputs], profile):
        assert abs(layer.sqnr_db - layer.expected_db) < 3


def test_an_artifact_without_a_reference_cannot_be_explained(cli: Cli, target: Path, onnx_file: Path) -> None:
    assert cli("checkpoint", onnx_file, "--out", target, "--no-residual").code == 0
    bare = Artifact.open(target)
    with pytest.raises(ArtifactError, match="--no-residual and keeps no fp32 reference"):
        layers(bare, [bare.golden().inputs], "cpu")


def test_an_unknown_profile_is_rejected_by_name(small: Artifact) -> None:
    with pytest.raises(ArtifactError, match="no ONNX profile 'torchscript' to explain; it has cpu, cpu-bf16, cuda"):
        layers(small, [small.golden().inputs], "torchscript")
