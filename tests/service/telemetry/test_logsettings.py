"""Changes of the log settings while the server runs: all of them or none, in effect for every logger at once."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence

import pytest
from ownlog import own_log

from bf16kit.messages.errors import InvalidRequest
from service.telemetry.settings import LogSettings

_Changes = Mapping[str, Sequence[bool | int | str]]
LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
OLD = logging.getLogger("service.made.before.the.change")
STARTED = {
    "log_file": ("",), "log_info": (True,), "log_warning": (True,), "log_error": (True,),
    "log_verbose_level": (0,), "log_format": ("ISO8601",),
}  # fmt: skip


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    with own_log("info", "text") as stream:
        yield stream


def heard(stream: io.StringIO) -> list[str]:
    """Return the levels that are written now, by a new logger and by an existing one."""
    new = logging.getLogger(f"service.made.{stream.tell()}")
    stream.seek(stream.truncate(0))
    for level in LEVELS:
        OLD.log(level, "before")
        new.log(level, "after")
    lines = stream.getvalue().splitlines()
    assert len(lines) % 2 == 0
    assert all("before" in line for line in lines[::2])
    return [json.loads(line)["level"].upper() if line.startswith("{") else line.split()[1] for line in lines[::2]]


@pytest.mark.parametrize(
    ("level", "changes", "written"),
    [
        ("info", {}, ["INFO", "WARNING", "ERROR", "CRITICAL"]),
        ("info", {"log_verbose_level": (1,)}, ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]),
        ("info", {"log_verbose_level": (9,), "log_info": (False,)}, ["DEBUG", "WARNING", "ERROR", "CRITICAL"]),
        ("info", {"log_info": (False,)}, ["WARNING", "ERROR", "CRITICAL"]),
        ("info", {"log_warning": (False,)}, ["INFO", "ERROR", "CRITICAL"]),
        ("debug", {"log_verbose_level": (0,)}, ["INFO", "WARNING", "ERROR", "CRITICAL"]),
        ("error", {"log_warning": (True,)}, ["WARNING", "ERROR", "CRITICAL"]),
        ("info", {"log_info": (False,), "log_warning": (False,), "log_error": (False,)}, []),
    ],
)
def test_each_level_is_on_or_off_by_itself(level: str, changes: _Changes, written: list[str]) -> None:
    with own_log(level, "text") as stream:
        LogSettings(level, "text").update(changes)
        assert heard(stream) == written


def test_the_format_can_be_changed_and_reset(stream: io.StringIO) -> None:
    settings = LogSettings("info", "text")
    for value, is_json in (("json", True), ("ISO8601", False), ("json", True), ("default", False)):
        settings.update({"log_format": (value,)})
        stream.seek(stream.truncate(0))
        OLD.info("hello")
        assert stream.getvalue().startswith("{") is is_json
    assert settings.update({"log_format": ("json",)})["log_format"] == ("json",)
    assert settings.update({"log_format": ()})["log_format"] == ("ISO8601",)


def test_the_returned_settings_give_another_process_the_same_state_and_a_change_is_logged() -> None:
    one, other = LogSettings("info", "text"), LogSettings("error", "json")
    assert one.update({}) == STARTED
    with own_log("error", "json") as stream:
        assert other.update(one.update({})) == STARTED
        assert heard(stream) == ["INFO", "WARNING", "ERROR", "CRITICAL"]
        other.update({"log_warning": (False,)})
        assert "log settings changed: log_warning=False" in stream.getvalue()
        back = other.update(dict.fromkeys(STARTED, ()))  # without values they return to those of the start
    assert (back["log_info"], back["log_error"], back["log_format"]) == ((False,), (True,), ("json",))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"log_file": ("/tmp/anywhere",)}, "log_file cannot be changed over the network"),
        ({"log_inof": (True,)}, "unknown log setting 'log_inof'; the settings are log_file, log_info"),
        ({"log_info": (1,)}, "log_info is '1'; give true or false"),
        ({"log_error": ("no",)}, "log_error is 'no'"),
        ({"log_verbose_level": (-1,)}, "log_verbose_level is '-1'; give 0"),
        ({"log_verbose_level": (True,)}, "log_verbose_level is 'True'"),
        ({"log_verbose_level": (2**32,)}, "log_verbose_level is '4294967296'"),
        ({"log_format": ("xml",)}, "log_format is 'xml'; give default, ISO8601, text, json"),
        ({"log_format": (True,)}, "log_format is 'True'"),
        ({"log_info": (True, False)}, "log_info has 2 values"),
    ],
)
def test_one_wrong_setting_leaves_all_settings_unchanged(wrong: _Changes, why: str, stream: io.StringIO) -> None:
    settings = LogSettings("info", "text")
    with pytest.raises(InvalidRequest, match=why):
        settings.update({"log_verbose_level": (1,), **wrong})
    assert settings.update({}) == STARTED
    assert heard(stream) == ["INFO", "WARNING", "ERROR", "CRITICAL"]
    with pytest.raises(InvalidRequest, match="leave the model's name out"):
        settings.update({}, "mlp")
