"""The settings that select which requests are traced. They have Triton's names and can change while the server runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import quoted

_Value = bool | int | str
_LARGEST = 2**31 - 1
_UNLIMITED = -1
_FIXED = {  # Triton's other settings, their fixed value, and why they cannot change
    "log_frequency": ("0", "spans are exported every second or so, and no file is written"),
    "trace_file": ("", "a client must not choose a file to write"),
    "trace_mode": ("opentelemetry", "this server has no other"),
}
_NAMES = ("trace_level", "trace_rate", "trace_count", *_FIXED)


@dataclass(frozen=True, slots=True)
class _Overrides:
    """The settings made for the server or for one model. None: not set, so the layer above applies."""

    level: bool | None = None  # TIMESTAMPS, or OFF
    rate: int | None = None  # trace one request in this many
    count: int | None = None  # traces left to make, or _UNLIMITED


class TraceSettings:
    """The :class:`service.operations.Settings` of tracing. Tracing is always off without an exporter.

    A setting that a model lacks is the server's; one that the server lacks is the one it was started with, one trace
    per ``rate`` requests. ``find`` raises NotFound for an unknown model. A request that already belongs to a trace was
    selected by its client, so only ``trace_count`` limits it.
    """

    def __init__(self, *, exports: bool, rate: int, find: Callable[[str], object]) -> None:
        self.on = exports  # False: nothing is traced, so sampled() need not be called
        self._exports = exports
        self._find = find
        self._start = _Overrides(exports, rate, _UNLIMITED)
        self._overrides: dict[str, _Overrides] = {"": _Overrides()}
        self._in_effect = {"": self._start}  # the settings in effect, for the server and each model with settings
        self._requests = {"": 0}  # requests that belong to no trace
        self._lock = threading.Lock()

    def update(self, changes: Mapping[str, Sequence[_Value]], model: str = "") -> Mapping[str, Sequence[_Value]]:
        """See :meth:`service.operations.Settings.update`."""
        if model:
            self._find(model)
        wanted = {name: tuple(str(value) for value in values) for name, values in changes.items()}
        with self._lock:
            overrides = self._overrides.get(model, _Overrides())
            for name, values in wanted.items():
                overrides = self._changed(overrides, name, values)
            if wanted:
                self._overrides[model] = overrides
                self._requests[model] = 0
                self._update_in_effect()
            now = self._effective(model)
        return {
            "trace_level": ("TIMESTAMPS" if now.level else "OFF",),
            "trace_rate": (str(now.rate),),
            "trace_count": (str(now.count),),
            **{name: (value,) for name, (value, _) in _FIXED.items()},
        }

    def sampled(self, model: str, parent_sampled: bool | None) -> bool:
        """Whether this request of ``model`` is traced.

        ``parent_sampled`` is the sampled flag of the request's trace; None without one.
        """
        with self._lock:
            scope = model if model in self._in_effect else ""
            now = self._in_effect[scope]
            if not now.level or now.count == 0 or parent_sampled is False:
                return False
            if parent_sampled is None:
                self._requests[scope] += 1
                if self._requests[scope] % (now.rate or 1):
                    return False
            if now.count != _UNLIMITED:
                self._count_down(scope)
            return True

    def _update_in_effect(self) -> None:
        self._in_effect = {model: self._effective(model) for model in self._overrides}
        self.on = any(overrides.level for overrides in self._in_effect.values())

    def _effective(self, model: str) -> _Overrides:
        """Return the settings in effect for ``model``: its own, else the server's, else those of the start."""
        found = self._start
        for overrides in (self._overrides[""], self._overrides.get(model, _Overrides())):
            values_set = {field.name: getattr(overrides, field.name) for field in fields(overrides)}
            found = replace(found, **{name: value for name, value in values_set.items() if value is not None})
        return found

    def _count_down(self, scope: str) -> None:
        """Decrement the count of traces: the model's, or the server's if the model has none."""
        owner = scope if self._overrides[scope].count is not None else ""
        overrides = self._overrides[owner]
        self._overrides[owner] = replace(overrides, count=(overrides.count or 0) - 1)
        self._update_in_effect()

    def _changed(self, overrides: _Overrides, name: str, values: tuple[str, ...]) -> _Overrides:
        if name == "trace_level":
            return replace(overrides, level=self._level(values))
        if name == "trace_rate":
            return replace(overrides, rate=_number(name, values, 1))
        if name == "trace_count":
            return replace(overrides, count=_number(name, values, _UNLIMITED))
        if name not in _FIXED:
            raise InvalidRequest(f"unknown trace setting {quoted(name)}; the settings are {', '.join(_NAMES)}")
        fixed, reason = _FIXED[name]
        if values not in ((), (fixed,)):
            raise InvalidRequest(f"{name} cannot be changed: {reason}")
        return overrides

    def _level(self, values: tuple[str, ...]) -> bool | None:
        if values == ("TIMESTAMPS",) and not self._exports:
            raise InvalidRequest("no trace exporter is configured; start with trace_exporter: otlp")
        if values not in ((), ("OFF",), ("TIMESTAMPS",)):
            raise InvalidRequest(
                f"trace_level is {quoted(','.join(values))}; give OFF or TIMESTAMPS: tensors are never part of a trace"
            )
        return values == ("TIMESTAMPS",) if values else None


def _number(name: str, values: tuple[str, ...], least: int) -> int | None:
    if not values:
        return None
    text = values[0]
    digits = text.removeprefix("-")
    is_number = len(values) == 1 and digits.isascii() and digits.isdecimal() and len(digits) < 11
    if is_number and least <= int(text) <= _LARGEST:
        return int(text)
    raise InvalidRequest(f"{name} is {quoted(','.join(values))}; give one integer from {least} to {_LARGEST}")
