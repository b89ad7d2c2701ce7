"""Checks of the trace and logging extensions: settings are returned, changed one by one, and rejected if invalid.

Changed settings are restored.
"""

from __future__ import annotations

from oip_conformance.checks.metadata import UNKNOWN_NAME
from oip_conformance.checks.sources import OBSERVED, extension
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Code, InvalidCall, Skipped, check, must, refusal

_TRACE, _LOG = extension("trace"), extension("logging")


def _trace(session: Session, model: str = "", **settings: list[str]) -> dict[str, list[str]]:
    request = pb.TraceSettingRequest(model_name=model)
    for name, values in settings.items():
        request.settings[name].value.extend(values)
    response = session.target.call(request)
    must(response.ok, "the settings", response, request)
    return {name: list(setting.value) for name, setting in response.message.settings.items()}


def _log(session: Session, level: int | None = None) -> dict[str, pb.LogSettingsResponse.SettingValue]:
    request = pb.LogSettingsRequest()
    if level is not None:
        request.settings["log_verbose_level"].uint32_param = level
    response = session.target.call(request)
    must(response.ok, "the settings", response, request)
    return dict(response.message.settings)


@check(
    "trace.settings",
    MUST,
    _TRACE,
    "TraceSetting returns the latest settings: trace_level, trace_rate, log_frequency among them.",
    "trace",
)
def trace_settings(session: Session) -> None:
    settings = _trace(session)
    for name in ("trace_level", "trace_rate", "log_frequency"):
        must(settings.get(name), f"{name} among the settings", settings)


@check("trace.change", MUST, _TRACE, "Only the specified settings are updated, and the updated ones returned.", "trace")
def trace_change(session: Session) -> None:
    _must_be_changeable(session, pb.TraceSettingRequest())
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


@check("trace.of-model", MUST, _TRACE, "A model's settings begin as the server's, and change apart from them.", "trace")
def trace_of_model(session: Session) -> None:
    _must_be_changeable(session, pb.TraceSettingRequest())
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


def _must_be_changeable(session: Session, request: pb.TraceSettingRequest | pb.LogSettingsRequest) -> None:
    """Skip if the operator does not let clients change settings. ``request`` gets a setting's current value."""
    if isinstance(request, pb.TraceSettingRequest):
        request.settings["trace_rate"].value.extend(_trace(session).get("trace_rate", []))
    else:
        request.settings["log_verbose_level"].uint32_param = _log(session)["log_verbose_level"].uint32_param
    response = session.target.call(request)
    if response.code in (Code.UNIMPLEMENTED, Code.PERMISSION_DENIED):
        raise Skipped(f"settings can be read, and not changed: {response}")


def _bad_trace(session: Session, model: str = "", **settings: str) -> InvalidCall:
    _must_be_changeable(session, pb.TraceSettingRequest())
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in settings.items():
        request.settings[name].value.append(value)
    return InvalidCall(request, [model, *settings] if model else [*settings])


def _bad_log(session: Session, name: str, **value: object) -> InvalidCall:
    _must_be_changeable(session, pb.LogSettingsRequest())
    request = pb.LogSettingsRequest()
    request.settings[name].CopyFrom(pb.LogSettingsRequest.SettingValue(**value))  # type: ignore[arg-type]  # one of three
    return InvalidCall(request, [name])


TRACE_UNKNOWN_MODEL = refusal(
    "trace.unknown-model", TRITON, OBSERVED, "Settings of an unknown model are an error.",
    [Code.INVALID_ARGUMENT, Code.NOT_FOUND], lambda session: _bad_trace(session, UNKNOWN_NAME), "trace",
)  # fmt: skip
TRACE_RATE = refusal(
    "trace.rate-a-word", TRITON, OBSERVED, "trace_rate is a number.", [Code.INVALID_ARGUMENT],
    lambda session: _bad_trace(session, trace_rate="often"), "trace",
)  # fmt: skip
TRACE_FILE = refusal(
    "trace.file", TRITON, OBSERVED, "A client cannot choose the file that traces are written to.",
    [Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED],
    lambda session: _bad_trace(session, trace_file="/tmp/conformance"), "trace",  # noqa: S108 -- must be rejected
)  # fmt: skip


@check(
    "log.settings",
    MUST,
    _LOG,
    "LogSettings returns the latest settings: log_info and log_verbose_level among them, of their types.",
    "logging",
)
def log_settings(session: Session) -> None:
    settings = _log(session)
    for name, kind in (("log_info", "bool_param"), ("log_error", "bool_param"), ("log_verbose_level", "uint32_param")):
        received = settings[name].WhichOneof("parameter_choice") if name in settings else "nothing"
        must(received == kind, f"{name} as {kind}", received)


@check("log.change", MUST, _LOG, "Only the specified settings are updated, and all are returned.", "logging")
def log_change(session: Session) -> None:
    _must_be_changeable(session, pb.LogSettingsRequest())
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
    "log.wrong-type", TRITON, OBSERVED, "log_info is a bool.", [Code.INVALID_ARGUMENT],
    lambda session: _bad_log(session, "log_info", string_param="yes"), "logging",
)  # fmt: skip
LOG_FORMAT = refusal(
    "log.unknown-format", TRITON, OBSERVED, "An unknown log_format is rejected.", [Code.INVALID_ARGUMENT],
    lambda session: _bad_log(session, "log_format", string_param="conformance"), "logging",
)  # fmt: skip
LOG_FILE = refusal(
    "log.file", TRITON, OBSERVED, "A client cannot choose the file that the log is written to.",
    [Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT, Code.PERMISSION_DENIED],
    lambda session: _bad_log(session, "log_file", string_param="/tmp/conformance"), "logging",  # noqa: S108 -- must be rejected
)  # fmt: skip
