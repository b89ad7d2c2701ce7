"""The settings that select which requests are traced. They have Triton's names and can change while the server runs."""

from __future__ import annotations

import re
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import quoted

_Value = bool | int | str
_LARGEST = 2**31 - 1
_UNLIMITED = -1
_USUAL_RATE = 1000  # Triton's, which a server that traces nothing shows
_FIXED = {  # Triton's other settings, their fixed value, and why they cannot change
    "log_frequency": ("0", "OpenTelemetry exports spans every few seconds, and no file is written"),
    "trace_file": ("", "a client must not choose a file to write"),
    "trace_mode": ("opentelemetry", "this server has no other"),
}
_NAMES = ("trace_level", "trace_rate", "trace_count", *_FIXED)
_LEVELS = {"OFF": 0, "TIMESTAMPS": 1}


class TraceSettings:
    """The :class:`service.operations.Settings` of tracing. With ``rate`` 0, nothing is exported, so tracing stays off.

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
        """See :meth:`service.operations.Settings.update`."""
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
        if name not in _NAMES:
            raise InvalidRequest(f"unknown trace setting {quoted(name)}; the settings are {', '.join(_NAMES)}")
        if not values:
            return None
        if name != "trace_level":
            return _number(name, values, 1 if name == "trace_rate" else _UNLIMITED)
        if len(values) != 1 or values[0] not in _LEVELS:
            raise InvalidRequest(
                f"trace_level is {quoted(','.join(values))}; give OFF or TIMESTAMPS: tensors are never part of a trace"
            )
        if values[0] == "TIMESTAMPS" and not self._exports:
            raise InvalidRequest("this server exports no traces; start it with a trace_rate, one trace per so many")
        return _LEVELS[values[0]]


def _number(name: str, values: tuple[str, ...], least: int) -> int:
    is_number = len(values) == 1 and re.fullmatch("-?[0-9]{1,10}", values[0])
    if is_number and least <= int(values[0]) <= _LARGEST:
        return int(values[0])
    raise InvalidRequest(f"{name} is {quoted(','.join(values))}; give one integer from {least} to {_LARGEST}")
