from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from othersfiles import closed, open_place
from small import publish_small

from bf16kit.artifact import Artifact
from bf16kit.errors import ArtifactDamaged


@pytest.mark.parametrize("what", [".", "manifest.json", "weights.bf16"])
def test_an_artifact_of_another_user_is_told_with_who_may_not_read_it(tmp_path: Path, what: str) -> None:
    """A volume that root filled: a line that says whom to let in, and no traceback."""
    published = publish_small(tmp_path / "a" / "1").path
    with open_place() as place:
        artifact = shutil.copytree(published, place / "1")
        with closed(artifact / what) as user, pytest.raises(ArtifactDamaged) as refusal:
            Artifact.open(artifact)
    assert f"missing or unreadable (Permission denied to user {user})" in str(refusal.value)


def test_a_file_cut_short_is_told_with_what_to_do(tmp_path: Path) -> None:
    published = publish_small(tmp_path / "a" / "1").path
    weights = published / "weights.bf16"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ArtifactDamaged, match=r"bytes, the manifest says .*; copy or convert the artifact again"):
        Artifact.open(published)
