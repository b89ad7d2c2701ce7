"""Changing keys of a ``serving.yaml`` without changing the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bf16kit.messages.errors import ConfigError
from service.commands.servingfile import update

CHANGES = {"max_batch_size": 8, "instances": 2, "max_queue_size": 1}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serving.yaml"


def test_a_missing_file_is_created(file: Path) -> None:
    difference = update(file, CHANGES)
    assert yaml.safe_load(file.read_text()) == CHANGES
    assert "+instances: 2" in difference.splitlines()


def test_comments_and_other_keys_stay_as_they_are(file: Path) -> None:
    text = "# first\ninstances: 4   # four\nshadow:\n  rate: 0.5\n# instances: 9\nmax_queue_size:\nwarmup: [1, 2]"
    file.write_text(text)
    update(file, CHANGES)
    assert file.read_text() == (
        "# first\ninstances: 2   # four\nshadow:\n  rate: 0.5\n# instances: 9\nmax_queue_size: 1\nwarmup: [1, 2]\n"
        "max_batch_size: 8\n"
    )


def test_a_nested_key_of_the_same_name_is_not_changed(file: Path) -> None:
    file.write_text("max_dims:\n  instances: 5\n")
    update(file, {"instances": 2})
    assert yaml.safe_load(file.read_text()) == {"max_dims": {"instances": 5}, "instances": 2}


@pytest.mark.parametrize("text", ["{instances: 4, warmup: [1]}\n", '"instances": 4\nwarmup: [1]\n', "{}\n"])
def test_a_file_that_cannot_be_changed_line_by_line_is_rewritten(file: Path, text: str) -> None:
    file.write_text(text)
    before = yaml.safe_load(text)
    update(file, CHANGES)
    assert yaml.safe_load(file.read_text()) == {**before, **CHANGES}


def test_a_file_that_has_the_values_already_is_not_written(file: Path) -> None:
    update(file, CHANGES)
    before = file.stat().st_ino
    assert update(file, CHANGES) == ""
    assert file.stat().st_ino == before


def test_the_files_permissions_stay_and_no_other_file_is_left(file: Path) -> None:
    file.write_text("instances: 1\n")
    file.chmod(0o640)
    update(file, CHANGES)
    assert file.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in file.parent.iterdir()] == ["serving.yaml"]


def test_a_link_stays_a_link_to_the_changed_file(file: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("instances: 1\n")
    file.symlink_to(real)
    update(file, CHANGES)
    assert file.is_symlink()
    assert yaml.safe_load(real.read_text()) == CHANGES


@pytest.mark.parametrize("text", ["instances: [\n", "unknown: 1\n", "- 1\n"])
def test_a_file_that_is_already_invalid_is_rejected_and_not_changed(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError):
        update(file, CHANGES)
    assert file.read_text() == text
