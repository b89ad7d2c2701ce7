"""Which directory of an Orbax checkpoint has the arrays, and that no link in it leads to other directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError
from converter.read.detect import Kind, recognise
from converter.read.orbax.layout import files_of, locate


def _item(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "_METADATA").write_text("{}")
    return path


def _steps(root: Path, *names: str) -> Path:
    for name in names:
        _item(root / name / "default")
        (root / name / "_CHECKPOINT_METADATA").write_text("{}")
    return root


def test_an_item_by_itself_is_recognised(tmp_path: Path) -> None:
    item = _item(tmp_path / "params")
    assert locate(item, None, None) == item
    assert recognise(item) is Kind.ORBAX


def test_an_array_in_its_own_folder_without_metadata_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "w.kernel").mkdir()
    (tmp_path / "w.kernel" / ".zarray").write_text("{}")
    assert locate(tmp_path, None, None) == tmp_path
    assert recognise(tmp_path) is Kind.ORBAX


@pytest.mark.parametrize(
    ("names", "newest"), [(("3", "20", "100"), "100"), (("step_0005", "step_0010"), "step_0010"), (("7",), "7")]
)
def test_the_newest_step_is_taken(tmp_path: Path, names: tuple[str, ...], newest: str) -> None:
    root = _steps(tmp_path, *names)
    assert locate(root, None, None) == root / newest / "default"
    assert recognise(root) is Kind.ORBAX


def test_steps_of_an_older_orbax_without_metadata_are_recognised(tmp_path: Path) -> None:
    _item(tmp_path / "run" / "7" / "default")
    assert recognise(tmp_path / "run") is Kind.ORBAX
    assert recognise(tmp_path / "run" / "7") is Kind.ORBAX
    assert locate(tmp_path / "run", None, None) == tmp_path / "run" / "7" / "default"


def test_step_directories_with_different_names_are_rejected_as_several_models(tmp_path: Path) -> None:
    for name in ("bert-2", "vit-16"):
        _item(tmp_path / name)
    with pytest.raises(
        NoCheckpoint, match=r"'bert-2' and 'vit-16' are checkpoints with different names, .* by its own path"
    ):
        recognise(tmp_path)


@pytest.mark.parametrize("step", [None, 10])
def test_no_step_is_chosen_among_several_models(tmp_path: Path, step: int | None) -> None:
    root = _steps(tmp_path, "ema_10", "model_10", "old_200", "x-1", "y-1", "z-1", "z-2")
    said = r"'ema_10', 'model_10', 'old_200', 'x-1', 'y-1' and 1 others are checkpoints with different names"
    with pytest.raises(NoCheckpoint, match=said):
        recognise(root)
    with pytest.raises(NoCheckpoint, match=said):
        locate(root, step, None)
    assert locate(root / "ema_10", None, None) == root / "ema_10" / "default"


def test_a_step_in_two_directories_is_rejected_unless_one_is_committed(tmp_path: Path) -> None:
    root = _steps(tmp_path, "model_010", "model_10")
    for what in (lambda: recognise(root), lambda: locate(root, None, None), lambda: locate(root, 10, None)):
        with pytest.raises(SourceError, match="'model_010' and 'model_10' are both step 10; convert one of them"):
            what()
    (root / "model_10" / "commit_success.txt").touch()
    assert locate(root, 10, None) == root / "model_10" / "default"


def test_the_requested_step_is_taken(tmp_path: Path) -> None:
    root = _steps(tmp_path, "3", "20")
    assert locate(root, 3, None) == root / "3" / "default"
    with pytest.raises(UsageError, match=r"--step 4: .* has 3, 20"):
        locate(root, 4, None)


def test_a_step_that_is_still_being_written_is_ignored(tmp_path: Path) -> None:
    root = _steps(tmp_path, "3", "9.orbax-checkpoint-tmp-1700000000")
    assert locate(root, None, None) == root / "3" / "default"


def test_if_commits_are_marked_only_marked_steps_count(tmp_path: Path) -> None:
    root = _steps(tmp_path, "3", "9")
    (root / "3" / "commit_success.txt").touch()
    assert locate(root, None, None) == root / "3" / "default"


def test_a_step_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    root = _steps(tmp_path / "a", "3")
    elsewhere = _steps(tmp_path / "b", "9")
    (root / "9").symlink_to(elsewhere / "9")
    assert locate(root, None, None) == root / "3" / "default"


def test_several_items_are_listed(tmp_path: Path) -> None:
    root = _steps(tmp_path, "3")
    _item(root / "3" / "ema")
    with pytest.raises(UsageError, match="holds several items, default, ema; choose one with --item NAME"):
        locate(root, None, None)
    assert locate(root, None, "ema") == root / "3" / "ema"
    with pytest.raises(UsageError, match=r"--item other: .* has default, ema"):
        locate(root, None, "other")


def test_the_v1_api_stores_its_state_in_a_subdirectory(tmp_path: Path) -> None:
    _item(tmp_path / "state")
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    assert locate(tmp_path, None, None) == tmp_path / "state"
    assert recognise(tmp_path) is Kind.ORBAX


@pytest.mark.parametrize(("step", "item", "said"), [(3, None, "--step 3"), (None, "params", "--item params")])
def test_a_single_item_rejects_the_options_step_and_item(
    tmp_path: Path, step: int | None, item: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=f"{said}: .* is a single item"):
        locate(_item(tmp_path / "x"), step, item)


def test_a_step_without_arrays_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(SourceError, match="holds no arrays that Orbax wrote"):
        locate(tmp_path, None, None)


def test_files_are_listed_with_their_sizes(tmp_path: Path) -> None:
    item = _item(tmp_path / "x")
    (item / "d").mkdir()
    (item / "d" / "0").write_bytes(b"123")
    assert files_of(item) == {"_METADATA": 2, "d/0": 3}


@pytest.mark.parametrize("target", ["/etc/hostname", "/dev/zero", "_METADATA", ".."])
def test_links_are_rejected_wherever_they_lead(tmp_path: Path, target: str) -> None:
    item = _item(tmp_path / "x")
    (item / "d").mkdir()
    (item / "d" / "0").symlink_to(target)
    with pytest.raises(SourceError, match="d/0: is a link"):
        files_of(item)


def test_pipes_are_rejected_and_not_waited_for(tmp_path: Path) -> None:
    item = _item(tmp_path / "x")
    os.mkfifo(item / "manifest.ocdbt")
    with pytest.raises(SourceError, match="neither file nor directory"):
        files_of(item)
