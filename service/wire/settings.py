"""Log and trace settings, as the protocol writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bf16kit.protocol import inference_pb2 as pb
from service.operations import Setting

Settings = Mapping[str, Sequence[Setting]]


def trace_changes(message: pb.TraceSettingRequest) -> Settings:
    """Texts by setting; none where a setting shall go back to its default."""
    return {name: tuple(setting.value) for name, setting in message.settings.items()}


def trace_response(settings: Settings) -> pb.TraceSettingResponse:
    """All of them as texts."""
    value = pb.TraceSettingResponse.SettingValue
    return pb.TraceSettingResponse(
        settings={name: value(value=[str(each) for each in values]) for name, values in settings.items()}
    )


def log_changes(message: pb.LogSettingsRequest) -> Settings:
    """The value of each setting; none where it shall go back to its default."""

    def given(setting: pb.LogSettingsRequest.SettingValue) -> tuple[Setting, ...]:
        kind = setting.WhichOneof("parameter_choice")
        return () if kind is None else (getattr(setting, kind),)

    return {name: given(setting) for name, setting in message.settings.items()}


def log_response(settings: Settings) -> pb.LogSettingsResponse:
    """Each by its kind."""
    return pb.LogSettingsResponse(settings={name: _log_value(values[0]) for name, values in settings.items()})


def _log_value(value: Setting) -> pb.LogSettingsResponse.SettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponse.SettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponse.SettingValue(uint32_param=value)
    return pb.LogSettingsResponse.SettingValue(string_param=value)
