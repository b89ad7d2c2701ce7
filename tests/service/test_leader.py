"""Shared memory as configured: off by default, limited to a name prefix, and only on systems where it is safe."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from forbidden import without

from bf16kit.messages.errors import ConfigError, InvalidRequest
from service.config.serverconfig import load_config
from service.leader import open_regions
from service.operations import Region


@pytest.mark.parametrize(
    ("text", "prefix"),
    [("true", "bf16kit"), ("1", "bf16kit"), ("ours", "ours"), ("*", ""), ("false", None), ("", None)],
)
def test_a_variable_turns_it_on_for_names_with_a_prefix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, text: str, prefix: str | None
) -> None:
    monkeypatch.setenv("BF16KIT_SHARED_MEMORY", text)
    caplog.set_level(logging.INFO)
    table = open_regions(load_config({"repository": tmp_path}))
    assert (table is None) is (prefix is None)
    assert ("shared_memory is *: clients may register every file" in caplog.text) is (prefix == "")
    if table is not None:
        assert (f"whose names begin with {prefix!r}" in caplog.text) is (prefix != "")
        with pytest.raises(InvalidRequest, match=f"its name beginning with '{prefix}'"):
            table.register(Region("r", "/other-file-that-is-not-there", 0, 1))


@pytest.mark.parametrize("prefix", ["/bf16kit", "a/b", "*foo", "none", "..\0/", "", 7, []])
def test_a_prefix_that_no_plain_file_name_can_begin_with_is_rejected(tmp_path: Path, prefix: object) -> None:
    with pytest.raises(ConfigError, match=r"'shared_memory' is .*give true, false, the start of a file's name"):
        load_config({"repository": tmp_path, "shared_memory": prefix or [prefix]})


def test_a_system_that_forbids_safe_copies_is_an_error_at_start(tmp_path: Path) -> None:
    config = load_config({"repository": tmp_path, "shared_memory": True})
    with pytest.raises(ConfigError, match="needs the system call process_vm_writev, which is not allowed here"):
        without("process_vm_writev", lambda: open_regions(config))
