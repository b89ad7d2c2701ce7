"""Triton's log and trace settings: all changes of a request or none, at once, for the server and for one model."""

import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence

import pytest
from ownlog import own_log

from bf16kit.messages.errors import InvalidRequest, NotFound
from bf16kit.service.telemetry.settings import LogSettings, TraceSettings

Changes = Mapping[str, Sequence[bool | int | str]]
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
def test_each_level_is_on_or_off_by_itself(level: str, changes: Changes, written: list[str]) -> None:
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
def test_one_wrong_log_setting_leaves_all_unchanged(wrong: Changes, why: str, stream: io.StringIO) -> None:
    settings = LogSettings("info", "text")
    with pytest.raises(InvalidRequest, match=why):
        settings.update({"log_verbose_level": (1,), **wrong})
    assert settings.update({}) == STARTED
    assert heard(stream) == ["INFO", "WARNING", "ERROR", "CRITICAL"]
    with pytest.raises(InvalidRequest, match="leave the model's name out"):
        settings.update({}, "mlp")


# --- which requests are traced ----------------------------------------------------------------------------------------


def known(model: str) -> None:
    if model not in ("a", "b"):
        raise NotFound(f"unknown model {model!r}")


def tracing(rate: int = 3) -> TraceSettings:
    return TraceSettings(rate, find=known)


def traced(of: TraceSettings, requests: int, model: str = "a", asked: bool | None = None) -> list[int]:
    """Return which of ``requests`` requests are traced, counted from 1."""
    return [i for i in range(1, requests + 1) if of.sampled(model, asked)]


def test_one_of_rate_requests_is_traced_whatever_its_model() -> None:
    one = tracing(3)
    assert traced(one, 7) == [3, 6]
    assert traced(one, 3, "b") == [2]
    assert traced(one, 3, "never heard of") == [2]


def test_a_requests_own_trace_context_decides_whether_it_is_traced_unless_tracing_is_off() -> None:
    assert traced(tracing(1000), 3, asked=True) == [1, 2, 3]
    assert traced(tracing(1), 3, asked=False) == []
    one = tracing(1)
    one.update({"trace_level": ("OFF",)})
    assert [one.on] == [False]
    assert traced(one, 3) == traced(one, 3, asked=True) == []
    one.update({"trace_level": ("TIMESTAMPS",)})
    assert [one.on] == [True]
    assert traced(one, 2) == [1, 2]


def test_a_trace_count_runs_out_and_shows_the_rest() -> None:
    one = tracing(2)
    one.update({"trace_count": ("3",)})
    assert traced(one, 2) == [2]
    assert one.update({})["trace_count"] == ("2",)
    assert traced(one, 9) == [2, 4]
    assert one.update({})["trace_count"] == ("0",)
    assert traced(one, 9, asked=True) == []
    one.update({"trace_count": ("-1",)})
    assert traced(one, 4) == [2, 4]


def test_a_models_settings_override_the_servers_until_they_are_cleared() -> None:
    one = tracing(4)
    one.update({"trace_rate": ("1",), "trace_count": ("2",)}, "a")
    assert traced(one, 5, "a") == [1, 2]
    assert traced(one, 5, "b") == [4]
    one.update({"trace_level": ("OFF",)})
    one.update({"trace_level": ("TIMESTAMPS",), "trace_count": ()}, "a")
    assert (traced(one, 3, "a"), traced(one, 8, "b")) == ([1, 2, 3], [])
    back = one.update({"trace_level": (), "trace_rate": ()}, "a")
    assert (back["trace_level"], back["trace_rate"]) == (("OFF",), ("4",))
    assert not one.on

    one = tracing(1)  # a model without a count uses the server's
    one.update({"trace_count": ("2",)})
    one.update({"trace_rate": ("1",)}, "a")
    assert (traced(one, 1, "a"), traced(one, 3, "b"), traced(one, 3, "a")) == ([1], [1], [])


def test_settings_are_strings_under_tritons_names_and_cleared_ones_return_to_their_start_values() -> None:
    one = tracing(3)
    one.update({"trace_level": ("OFF",), "trace_rate": ("2",), "trace_count": ("5",)})
    assert one.update(dict.fromkeys(("trace_level", "trace_rate", "trace_count"), ())) == {
        "trace_level": ("TIMESTAMPS",), "trace_rate": ("3",), "trace_count": ("-1",),
        "log_frequency": ("0",), "trace_file": ("",), "trace_mode": ("opentelemetry",),
    }  # fmt: skip
    assert one.on


def test_with_a_rate_of_0_tracing_is_off_and_cannot_be_enabled() -> None:
    one = tracing(0)
    assert (one.on, one.update({})["trace_level"], one.update({})["trace_rate"]) == (False, ("OFF",), ("1000",))
    with pytest.raises(InvalidRequest, match="exports no traces; start it with a trace_rate"):
        one.update({"trace_level": ("TIMESTAMPS",)})
    assert traced(one, 2, asked=True) == []


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"trace_file": ("/etc/passwd",)}, "trace_file cannot be changed: a client must not choose a file"),
        ({"trace_mode": ("triton",)}, "trace_mode cannot be changed"),
        ({"log_frequency": ("5",)}, "log_frequency cannot be changed"),
        ({"trace_level": ("TENSORS",)}, "tensors are never part of a trace"),
        ({"trace_level": ("OFF", "TIMESTAMPS")}, "trace_level is 'OFF,TIMESTAMPS'"),
        ({"trace_rate": ("0",)}, "trace_rate is '0'; give one integer from 1 to 2147483647"),
        ({"trace_rate": ("1.5",)}, "trace_rate is '1.5'"),
        ({"trace_rate": ("1", "2")}, "trace_rate is '1,2'"),
        ({"trace_rate": ("²",)}, "trace_rate is"),
        ({"trace_count": ("-2",)}, "trace_count is '-2'; give one integer from -1"),
        ({"trace_count": ("9" * 5000,)}, "trace_count is"),
        ({"trace_rat": ("2",)}, "unknown trace setting 'trace_rat'; the settings are trace_level, trace_rate"),
    ],
)
def test_one_wrong_trace_setting_leaves_all_unchanged(wrong: Changes, why: str) -> None:
    one = tracing(3)
    with pytest.raises(InvalidRequest, match=why):
        one.update({"trace_rate": ("2",), **wrong})
    for changes in ({}, {"trace_rate": ("1",)}):
        with pytest.raises(NotFound, match="unknown model 'c'"):
            one.update(changes, "c")
    assert one.update({}) == tracing(3).update({})
