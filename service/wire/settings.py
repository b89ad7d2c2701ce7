"""Log and trace settings in protocol messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bf16kit.protocol import inference_pb2 as pb
from service.operations import Setting

Settings = Mapping[str, Sequence[Setting]]


def trace_changes(message: pb.TraceSettingRequest) -> Settings:
    """Return texts by setting; an empty tuple returns the setting to its default."""
    return {name: tuple(setting.value) for name, setting in message.settings.items()}


def trace_response(settings: Settings) -> pb.TraceSettingResponse:
    """Return the settings as texts."""
    value = pb.TraceSettingResponse.SettingValue
    return pb.TraceSettingResponse(
        settings={name: value(value=[str(each) for each in values]) for name, values in settings.items()}
    )


def log_changes(message: pb.LogSettingsRequest) -> Settings:
    """Return the value of each setting; an empty tuple returns the setting to its default."""

    def given(setting: pb.LogSettingsRequest.SettingValue) -> tuple[Setting, ...]:
        kind = setting.WhichOneof("parameter_choice")
        return () if kind is None else (getattr(setting, kind),)

    return {name: given(setting) for name, setting in message.settings.items()}


def log_response(settings: Settings) -> pb.LogSettingsResponse:
    """Return the settings, each in the field of its type."""
    return pb.LogSettingsResponse(settings={name: _log_value(values[0]) for name, values in settings.items()})


def _log_value(value: Setting) -> pb.LogSettingsResponse.SettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponse.SettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponse.SettingValue(uint32_param=value)
    return pb.LogSettingsResponse.SettingValue(string_param=value)
