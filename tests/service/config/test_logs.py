from __future__ import annotations

import json
import logging
import os
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ownlog import own_log

from service.config import logs
from service.config.logs import JsonFormatter, TextFormatter


def record(message: str, *args: object, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("service.x", logging.INFO, "x.py", 1, message, args, exc_info)
    vars(made).update(extra)
    return made


def failure() -> ValueError:
    try:
        raise ValueError("why\nand how")
    except ValueError as error:
        return error


def parsed(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    return found


HOSTILE = "a\n2026-01-01T00:00:00.000Z INFO forged\r\nb\u2028c\u2029d\x85e\x0bf\x1cg\x1b[2Kh\x00i\x08j\udcffk\u202el"


def test_an_event_is_one_line_with_time_in_utc_level_and_origin() -> None:
    line = TextFormatter().format(record("model %r is ready", "m"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO service\.x: model 'm' is ready", line)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_no_text_can_forge_a_second_event_or_command_a_terminal(formatter: logging.Formatter) -> None:
    line = formatter.format(record("name %s", HOSTILE, request_id=HOSTILE))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    line.encode("utf-8")  # no lone surrogate


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_one_line_in_both_formats(text: str) -> None:
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(record("%s", text, request_id=text))
        assert len(line.splitlines()) == 1
        line.encode("utf-8")
    assert set(parsed(line)) == {"time", "level", "logger", "message", "request_id"}


def test_a_traceback_is_part_of_its_event() -> None:
    line = TextFormatter().format(record("failed", error=failure()))
    assert len(line.splitlines()) == 1
    assert "ValueError: why | and how" in line


def test_a_json_event_has_its_fields() -> None:
    event = parsed(
        JsonFormatter().format(record("model %r is ready", "m", error=failure(), incident="c0ffee", version=3))
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", event.pop("time"))
    assert "ValueError: why\nand how" in event.pop("exception")
    assert event == {
        "level": "info", "logger": "service.x", "message": "model 'm' is ready", "incident": "c0ffee", "version": "3",
    }  # fmt: skip


def test_other_attributes_of_a_record_are_not_logged_and_a_long_id_is_cut() -> None:
    event = parsed(JsonFormatter().format(record("x", payload="secret", token="secret", request_id="i" * 10_000)))
    assert "secret" not in json.dumps(event)
    assert event["request_id"] == "i" * 256


def test_grpc_does_not_log_what_its_peers_send(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC would log a header with a byte that is not UTF-8, such as a token's, with a traceback."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    grpcs = logging.getLogger("grpc._cython.cygrpc")
    logs.silence_grpc()
    logs.silence_grpc()
    assert os.environ["GRPC_VERBOSITY"] == "NONE"
    grpcs.error("Invalid encoding on %s", b"Bearer secret\xff")
    grpcs.error("anything else")
    assert [record.message for record in caplog.records] == ["anything else"]
    monkeypatch.setenv("GRPC_VERBOSITY", "debug")
    logs.silence_grpc()
    assert os.environ["GRPC_VERBOSITY"] == "debug"


@pytest.mark.parametrize("kind", ["text", "json"])
def test_the_log_has_the_configured_format(kind: logs.Format) -> None:
    with own_log("info", kind) as stream:
        logging.getLogger("service.y").info("hello")
        logging.getLogger("service.y").debug("not this")
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("{") is (kind == "json")
    assert "hello" in line
