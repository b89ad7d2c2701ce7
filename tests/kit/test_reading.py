from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from othersfiles import unreadable, world_readable_directory
from small import publish_small

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import Segment
from bf16kit.artifact.reading import read_bounded, read_segment
from bf16kit.messages.errors import ArtifactDamaged, UsageError


def test_a_segment_is_read_into_a_new_array_or_a_given_one(tmp_path: Path) -> None:
    file = tmp_path / "weights.bf16"
    file.write_bytes(bytes(range(100)))
    assert read_segment(file, Segment(offset=10, bytes=5)).tolist() == [10, 11, 12, 13, 14]
    place = np.zeros(7, np.uint8)
    read_segment(file, Segment(offset=97, bytes=3), place[2:5])
    assert place.tolist() == [0, 0, 97, 98, 99, 0, 0]


def test_a_truncated_or_missing_file_is_reported_as_damaged(tmp_path: Path) -> None:
    file = tmp_path / "weights.bf16"
    file.write_bytes(bytes(100))
    with pytest.raises(ArtifactDamaged, match=r"weights\.bf16: truncated to 100 bytes while it was read"):
        read_segment(file, Segment(offset=90, bytes=11))
    with pytest.raises(ArtifactDamaged, match=r"gone: missing or unreadable \(No such file"):
        read_segment(tmp_path / "gone", Segment(offset=0, bytes=1))


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_bytes(b"1" * (1 << 20))
    assert read_bounded(path, 1 << 20, UsageError, "of which nobody has so many") == b"1" * (1 << 20)


@pytest.mark.parametrize("endless", [False, True])
def test_a_file_over_the_limit_is_rejected_and_the_limit_is_named(tmp_path: Path, endless: bool) -> None:
    path = Path("/dev/zero")
    if not endless:
        path = tmp_path / "rules.yaml"
        path.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(UsageError, match=f"--map {path}: larger than 1 MiB, of which nobody has so many"):
        read_bounded(path, 1 << 20, UsageError, "of which nobody has so many", where=f"--map {path}")


def test_the_error_for_an_unreadable_file_gives_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml: cannot be read: No such file or directory"):
        read_bounded(tmp_path / "absent.yaml", 1, UsageError, "")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_bounded(tmp_path, 1, UsageError, "")


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
