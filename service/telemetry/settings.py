"""The log and trace settings that can change while the server runs, under the names that Triton gives them."""

from __future__ import annotations

import logging
import re
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import quoted
from bf16kit.service.config.logs import Format, adjust

_log = logging.getLogger(__name__)
_Value = bool | int | str
#: Triton's names of the log formats, and our own. Triton's ISO8601 is our text, whose times are in ISO 8601.
_FORMATS: Mapping[str, Format] = {"ISO8601": "text", "text": "text", "json": "json"}
_FORMAT_NAMES: Mapping[Format, str] = {"text": "ISO8601", "json": "json"}
_LOG_LEVELS = {
    logging.INFO: "log_info",
    logging.WARNING: "log_warning",
    logging.ERROR: "log_error",
    logging.DEBUG: "log_verbose_level",
}
_LARGEST_LOG_LEVEL = 2**32 - 1  # of Triton's uint32

_LARGEST = 2**31 - 1
_UNLIMITED = -1
_USUAL_RATE = 1000  # Triton's, which a server that traces nothing shows
_FIXED = {  # Triton's other settings, their fixed value, and why they cannot change
    "log_frequency": ("0", "OpenTelemetry exports spans every few seconds, and no file is written"),
    "trace_file": ("", "a client must not choose a file to write"),
    "trace_mode": ("opentelemetry", "this server has no other"),
}
_TRACE_NAMES = ("trace_level", "trace_rate", "trace_count", *_FIXED)
_TRACE_LEVELS = {"OFF": 0, "TIMESTAMPS": 1}


class LogSettings:
    """The server's log settings: see :class:`bf16kit.service.operations.Settings`.

    ``level`` and ``kind`` are the arguments of :func:`~bf16kit.service.config.logs.configure`; a setting without a
    value returns to them. ``log_verbose_level`` of 1 or more is DEBUG, with a line per request. The other levels are
    switched on and off separately.
    """

    def __init__(self, level: str, kind: Format) -> None:
        lowest = logging.getLevelNamesMapping()[level.upper()]
        self._defaults: dict[str, _Value] = {"log_file": ""}  # empty: standard error
        self._defaults |= {name: lowest <= number for number, name in _LOG_LEVELS.items()}
        self._defaults |= {"log_verbose_level": int(lowest <= logging.DEBUG), "log_format": _FORMAT_NAMES[kind]}
        self._values = dict(self._defaults)
        self._lock = threading.Lock()

    def update(self, changes: Mapping[str, Sequence[_Value]], model: str = "") -> Mapping[str, Sequence[_Value]]:
        """See :meth:`bf16kit.service.operations.Settings.update`. Models have no log settings of their own."""
        if model:
            raise InvalidRequest("log settings apply to the whole server; leave the model's name out")
        with self._lock:
            updated = self._values | {name: self._validated(name, values) for name, values in changes.items()}
            if updated != self._values:
                changed = ", ".join(
                    f"{name}={updated[name]}" for name in updated if updated[name] != self._values[name]
                )
                _log.warning("log settings changed: %s", changed)  # first: the change may switch warnings off
                self._values = updated
                adjust(_levels(updated), _FORMATS[str(updated["log_format"])])
            return {name: (value,) for name, value in updated.items()}

    def _validated(self, name: str, values: Sequence[_Value]) -> _Value:
        """Return the new value of ``name``. Raises InvalidRequest for an unknown name or a wrong value."""
        default = self._defaults.get(name)
        if default is None:
            raise InvalidRequest(f"unknown log setting {quoted(name)}; the settings are {', '.join(self._defaults)}")
        if len(values) > 1:
            raise InvalidRequest(f"{name} has {len(values)} values; give one, or none for its default, {default!r}")
        value = values[0] if values else default
        if name == "log_format":
            if value == "default":
                return default
            if value not in _FORMATS:
                raise InvalidRequest(f"log_format is {quoted(str(value))}; give default, {', '.join(_FORMATS)}")
            return _FORMAT_NAMES[_FORMATS[str(value)]]
        if name == "log_file" and value != default:
            raise InvalidRequest("log_file cannot be changed over the network; redirect standard error to a file")
        if type(value) is not type(default) or (isinstance(value, int) and not 0 <= value <= _LARGEST_LOG_LEVEL):
            expected = "true or false (bool_param)" if isinstance(default, bool) else "0 (off) or more (uint32_param)"
            raise InvalidRequest(f"{name} is {quoted(str(value))}; give {expected}")
        return value


def _levels(values: Mapping[str, _Value]) -> frozenset[int]:
    """Return the levels that are logged."""
    return frozenset(level for level, name in _LOG_LEVELS.items() if values[name])


class TraceSettings:
    """The :class:`bf16kit.service.operations.Settings` of tracing. With ``rate`` 0, nothing is exported: it is off.

    A setting that a model lacks is the server's; one that the server lacks is the one it was started with, one trace
    per ``rate`` requests. ``find`` raises NotFound for an unknown model. A request that already belongs to a trace was
    selected by its client, so only ``trace_count`` limits it.
    """

    def __init__(self, rate: int, find: Callable[[str], object]) -> None:
        self.on = self._exports = rate > 0  # on: False if nothing is traced, so that sampled() need not be called
        self._find = find
        self._lock = threading.Lock()  # guards all that follow
        self._start = {"trace_level": int(self._exports), "trace_rate": rate or _USUAL_RATE, "trace_count": _UNLIMITED}
        self._own: dict[str, dict[str, int]] = {"": {}}  # the settings made for the server (""), and for models
        self._requests: dict[str, int] = {"": 0}  # requests that belong to no trace

    def update(self, changes: Mapping[str, Sequence[_Value]], model: str = "") -> Mapping[str, Sequence[_Value]]:
        """See :meth:`bf16kit.service.operations.Settings.update`."""
        if model:
            self._find(model)
        wanted = {name: self._parsed(name, tuple(map(str, values))) for name, values in changes.items()}
        with self._lock:
            if wanted:
                merged = {**self._own.get(model, {}), **wanted}
                self._own[model] = {name: value for name, value in merged.items() if value is not None}
                self._requests[model] = 0
                self.on = any(self._in_effect(scope)["trace_level"] for scope in self._own)
            now = dict(self._in_effect(model))
        return {
            "trace_level": ("TIMESTAMPS" if now["trace_level"] else "OFF",),
            "trace_rate": (str(now["trace_rate"]),),
            "trace_count": (str(now["trace_count"]),),
            **{name: (value,) for name, (value, _) in _FIXED.items()},
        }

    def sampled(self, model: str, parent_sampled: bool | None) -> bool:
        """Whether this request of ``model`` is traced.

        ``parent_sampled`` is the sampled flag of the request's trace; None without one.
        """
        with self._lock:
            scope = model if model in self._own else ""
            now = self._in_effect(scope)
            if not now["trace_level"] or now["trace_count"] == 0 or parent_sampled is False:
                return False
            if parent_sampled is None:
                self._requests[scope] += 1
                if self._requests[scope] % now["trace_rate"]:
                    return False
            if now["trace_count"] != _UNLIMITED:  # the model's count, or the server's if the model has none
                self._own[scope if "trace_count" in self._own[scope] else ""]["trace_count"] -= 1
            return True

    def _in_effect(self, scope: str) -> MutableMapping[str, int]:
        return ChainMap(self._own.get(scope, {}), self._own[""], self._start)

    def _parsed(self, name: str, values: tuple[str, ...]) -> int | None:
        """Return a setting's new value; None without values, which clear it, and for a fixed one."""
        if name in _FIXED:
            fixed, reason = _FIXED[name]
            if values not in ((), (fixed,)):
                raise InvalidRequest(f"{name} cannot be changed: {reason}")
            return None
        if name not in _TRACE_NAMES:
            raise InvalidRequest(f"unknown trace setting {quoted(name)}; the settings are {', '.join(_TRACE_NAMES)}")
        if not values:
            return None
        if name != "trace_level":
            return _number(name, values, 1 if name == "trace_rate" else _UNLIMITED)
        if len(values) != 1 or values[0] not in _TRACE_LEVELS:
            raise InvalidRequest(
                f"trace_level is {quoted(','.join(values))}; give OFF or TIMESTAMPS: tensors are never part of a trace"
            )
        if values[0] == "TIMESTAMPS" and not self._exports:
            raise InvalidRequest("this server exports no traces; start it with a trace_rate, one trace per so many")
        return _TRACE_LEVELS[values[0]]


def _number(name: str, values: tuple[str, ...], least: int) -> int:
    is_number = len(values) == 1 and re.fullmatch("-?[0-9]{1,10}", values[0])
    if is_number and least <= int(values[0]) <= _LARGEST:
        return int(values[0])
    raise InvalidRequest(f"{name} is {quoted(','.join(values))}; give one integer from {least} to {_LARGEST}")
