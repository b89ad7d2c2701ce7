from __future__ import annotations

import logging
import re

from service.process.logs import OneLine


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("service.x", logging.INFO, "x.py", 1, message, args, exc_info)


def test_an_event_is_one_line_with_time_in_utc_level_and_origin() -> None:
    line = OneLine().format(record("model %r is ready", "m"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO service\.x: model 'm' is ready", line)


def test_no_text_can_forge_a_second_event() -> None:
    assert len(OneLine().format(record("name %s", "a\n2026-01-01 INFO forged\r\nb\u2028c")).splitlines()) == 1


def test_a_traceback_is_part_of_its_event() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        line = OneLine().format(record("failed", error=error))
    assert len(line.splitlines()) == 1
    assert "ValueError: why" in line
