from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from othersfiles import unreadable, world_readable_directory
from small import publish_small

from bf16kit.artifact.artifact import Artifact
from bf16kit.messages.errors import ArtifactDamaged


@pytest.mark.parametrize("what", [".", "manifest.json", "weights.bf16"])
def test_the_error_for_an_artifact_without_read_permission_names_the_user(tmp_path: Path, what: str) -> None:
    """This happens on a volume that root filled. The error says which user needs access, without a traceback."""
    published = publish_small(tmp_path / "a" / "1").path
    with world_readable_directory() as place:
        artifact = shutil.copytree(published, place / "1")
        with unreadable(artifact / what) as user, pytest.raises(ArtifactDamaged) as refusal:
            Artifact.open(artifact)
    assert f"missing or unreadable (Permission denied to user {user})" in str(refusal.value)


def test_the_error_for_a_truncated_file_says_what_to_do(tmp_path: Path) -> None:
    published = publish_small(tmp_path / "a" / "1").path
    weights = published / "weights.bf16"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ArtifactDamaged, match=r"bytes, the manifest says .*; copy or convert the artifact again"):
        Artifact.open(published)
