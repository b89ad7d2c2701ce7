"""Shared memory as configured: off by default, limited to a name prefix, and only on systems where it is safe."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from bf16kit.messages.errors import ConfigError, InvalidRequest
from service.config.serverconfig import load_config
from service.leader import open_regions
from service.operations import Region
from service.regions import files


def test_shared_memory_is_off_by_default(tmp_path: Path) -> None:
    assert open_regions(load_config({"repository": tmp_path})) is None


def test_an_empty_prefix_must_be_set_in_the_file_and_is_logged_as_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BF16KIT_SHARED_MEMORY_PREFIX", "")  # an empty variable counts as not set
    caplog.set_level(logging.INFO)
    table = open_regions(load_config({"repository": tmp_path, "shared_memory": True}))
    assert table is not None
    with pytest.raises(InvalidRequest, match="its name beginning with 'bf16kit'"):
        table.register(Region("r", "/other", 0, 1))
    assert "begin with 'bf16kit'" in caplog.text
    assert "WARNING" not in caplog.text
    file = tmp_path / "server.yaml"
    file.write_text('shared_memory: true\nshared_memory_prefix: ""\n')
    open_regions(load_config({"repository": tmp_path}, file))
    assert "shared_memory_prefix is empty" in caplog.text


@pytest.mark.parametrize("prefix", ["/bf16kit", "a/b", "..\\0/"])
def test_a_prefix_that_no_plain_file_name_can_begin_with_is_rejected(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ConfigError, match="'shared_memory_prefix' is"):
        load_config({"repository": tmp_path, "shared_memory_prefix": prefix})


def test_a_system_that_forbids_safe_copies_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_process_vm_writev", lambda *_: -1)  # as if seccomp forbids the call
    with pytest.raises(ConfigError, match="needs the system call process_vm_writev, which is not allowed here"):
        open_regions(load_config({"repository": tmp_path, "shared_memory": True}))
