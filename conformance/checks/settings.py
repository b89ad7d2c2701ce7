"""Checks of the trace and logging extensions: settings are returned, changed one by one, and rejected if invalid.

Changed settings are restored.
"""

from __future__ import annotations

from conformance.checks.metadata import NOBODY
from conformance.checks.sources import SEEN, extension
from conformance.protocol import inference_pb2 as pb
from conformance.session import Session
from conformance.suite import Code, Level, Question, Skipped, check, must, refusal

_TRACE, _LOG = extension("trace"), extension("logging")


def _trace(session: Session, model: str = "", **settings: list[str]) -> dict[str, list[str]]:
    request = pb.TraceSettingRequest(model_name=model)
    for name, values in settings.items():
        request.settings[name].value.extend(values)
    answer = session.target.call("TraceSetting", request)
    must(answer.ok, "the settings", answer, request)
    return {name: list(setting.value) for name, setting in answer.message.settings.items()}


def _log(session: Session, level: int | None = None) -> dict[str, pb.LogSettingsResponse.SettingValue]:
    request = pb.LogSettingsRequest()
    if level is not None:
        request.settings["log_verbose_level"].uint32_param = level
    answer = session.target.call("LogSettings", request)
    must(answer.ok, "the settings", answer, request)
    return dict(answer.message.settings)


@check(
    "trace.settings",
    Level.MUST,
    _TRACE,
    "TraceSetting returns the latest settings: trace_level, trace_rate, log_frequency among them.",
    "trace",
)
def trace_settings(session: Session) -> None:
    settings = _trace(session)
    for name in ("trace_level", "trace_rate", "log_frequency"):
        must(settings.get(name), f"{name} among the settings", settings)


@check(
    "trace.change",
    Level.MUST,
    _TRACE,
    "Only the specified settings are updated, and the updated ones returned.",
    "trace",
)
def trace_change(session: Session) -> None:
    _changeable(session, "TraceSetting")
    before = _trace(session)
    other = "501" if before.get("trace_rate") != ["501"] else "502"
    try:
        changed = _trace(session, trace_rate=[other])
        must(changed.get("trace_rate") == [other], f"trace_rate {other}", changed)
        rest = {name: value for name, value in before.items() if name != "trace_rate"}
        must({**changed, "trace_rate": []} == {**rest, "trace_rate": []}, f"the others as before: {rest}", changed)
        must(_trace(session) == changed, f"the settings to stay: {changed}", _trace(session))
    finally:
        _trace(session, trace_rate=before.get("trace_rate", []))


@check(
    "trace.of-model",
    Level.MUST,
    _TRACE,
    "A model's settings begin as the server's, and change apart from them.",
    "trace",
)
def trace_of_model(session: Session) -> None:
    _changeable(session, "TraceSetting")
    server = _trace(session)
    must(
        _trace(session, session.model.name) == server,
        f"the server's settings {server}",
        _trace(session, session.model.name),
    )
    try:
        _trace(session, session.model.name, trace_rate=["503"])
        must(_trace(session) == server, f"the server's to stay {server}", _trace(session))
    finally:
        _trace(session, session.model.name, trace_rate=[])


def _changeable(session: Session, rpc: str) -> None:
    """Skip if the operator does not let clients change settings; tries to set the current value again."""
    trace, log = pb.TraceSettingRequest(), pb.LogSettingsRequest()
    if rpc == "TraceSetting":
        trace.settings["trace_rate"].value.extend(_trace(session).get("trace_rate", []))
    else:
        log.settings["log_verbose_level"].uint32_param = _log(session)["log_verbose_level"].uint32_param
    answer = session.target.call(rpc, trace if rpc == "TraceSetting" else log)
    if answer.code in (Code.UNIMPLEMENTED, Code.PERMISSION_DENIED):
        raise Skipped(f"settings can be read, and not changed: {answer}")


def _bad_trace(session: Session, model: str = "", **settings: str) -> Question:
    _changeable(session, "TraceSetting")
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in settings.items():
        request.settings[name].value.append(value)
    return Question(request, [model, *settings] if model else [*settings], "TraceSetting")


def _bad_log(session: Session, name: str, **value: object) -> Question:
    _changeable(session, "LogSettings")
    request = pb.LogSettingsRequest()
    request.settings[name].CopyFrom(pb.LogSettingsRequest.SettingValue(**value))  # type: ignore[arg-type]  # one of three
    return Question(request, [name], "LogSettings")


TRACE_UNKNOWN_MODEL = refusal(
    "trace.unknown-model", Level.TRITON, SEEN, "Settings of an unknown model are an error.",
    [Code.INVALID_ARGUMENT, Code.NOT_FOUND], lambda session: _bad_trace(session, NOBODY), "trace",
)  # fmt: skip
TRACE_RATE = refusal(
    "trace.rate-a-word", Level.TRITON, SEEN, "trace_rate is a number.", [Code.INVALID_ARGUMENT],
    lambda session: _bad_trace(session, trace_rate="often"), "trace",
)  # fmt: skip
TRACE_FILE = refusal(
    "trace.file", Level.TRITON, SEEN, "The file that traces go to is not a client's to choose.",
    [Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED],
    lambda session: _bad_trace(session, trace_file="/tmp/conformance"), "trace",  # noqa: S108 -- must be refused
)  # fmt: skip


@check(
    "log.settings",
    Level.MUST,
    _LOG,
    "LogSettings returns the latest settings: log_info and log_verbose_level among them, of their types.",
    "logging",
)
def log_settings(session: Session) -> None:
    settings = _log(session)
    for name, kind in (("log_info", "bool_param"), ("log_error", "bool_param"), ("log_verbose_level", "uint32_param")):
        came = settings[name].WhichOneof("parameter_choice") if name in settings else "nothing"
        must(came == kind, f"{name} as {kind}", came)


@check("log.change", Level.MUST, _LOG, "Only the specified settings are updated, and all are returned.", "logging")
def log_change(session: Session) -> None:
    _changeable(session, "LogSettings")
    before = _log(session)
    level = before["log_verbose_level"].uint32_param
    try:
        changed = _log(session, 1 - min(level, 1))
        must(changed["log_verbose_level"].uint32_param == 1 - min(level, 1), "the level asked for", changed)
        must({*changed} == {*before}, f"all of {sorted(before)}", sorted(changed))
        must(changed["log_info"] == before["log_info"], "log_info as before", changed)
        now = _log(session)["log_verbose_level"].uint32_param
        must(now == 1 - min(level, 1), "the level to stay", now)
    finally:
        _log(session, level)


LOG_TYPE = refusal(
    "log.wrong-type", Level.TRITON, SEEN, "log_info is a bool.", [Code.INVALID_ARGUMENT],
    lambda session: _bad_log(session, "log_info", string_param="yes"), "logging",
)  # fmt: skip
LOG_FORMAT = refusal(
    "log.unknown-format", Level.TRITON, SEEN, "log_format is one of those that there are.", [Code.INVALID_ARGUMENT],
    lambda session: _bad_log(session, "log_format", string_param="conformance"), "logging",
)  # fmt: skip
LOG_FILE = refusal(
    "log.file", Level.TRITON, SEEN, "The file that the log goes to is not a client's to choose.",
    [Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED],
    lambda session: _bad_log(session, "log_file", string_param="/tmp/conformance"), "logging",  # noqa: S108 -- must be refused
)  # fmt: skip
