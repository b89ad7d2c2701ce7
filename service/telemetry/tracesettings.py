"""The settings that select which requests are traced. They have Triton's names and can change while the server runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from bf16kit.errors import InvalidRequest
from bf16kit.wording import quoted

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
class _Choice:
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
        self._start = _Choice(exports, rate, _UNLIMITED)
        self._chosen: dict[str, _Choice] = {"": _Choice()}
        self._holds = {"": self._start}  # the settings in effect, for the server and each model with settings
        self._seen = {"": 0}  # requests that belong to no trace
        self._lock = threading.Lock()

    def update(self, changes: Mapping[str, Sequence[_Value]], model: str = "") -> Mapping[str, Sequence[_Value]]:
        """See :meth:`service.operations.Settings.update`."""
        if model:
            self._find(model)
        wanted = {name: tuple(str(value) for value in values) for name, values in changes.items()}
        with self._lock:
            choice = self._chosen.get(model, _Choice())
            for name, values in wanted.items():
                choice = self._changed(choice, name, values)
            if wanted:
                self._chosen[model] = choice
                self._seen[model] = 0
                self._layer()
            now = self._effective(model)
        return {
            "trace_level": ("TIMESTAMPS" if now.level else "OFF",),
            "trace_rate": (str(now.rate),),
            "trace_count": (str(now.count),),
            **{name: (value,) for name, (value, _) in _FIXED.items()},
        }

    def sampled(self, model: str, asked: bool | None) -> bool:
        """Whether this request of ``model`` is traced.

        ``asked`` is the sampled flag of the request's trace; None without one.
        """
        with self._lock:
            scope = model if model in self._holds else ""
            now = self._holds[scope]
            if not now.level or now.count == 0 or asked is False:
                return False
            if asked is None:
                self._seen[scope] += 1
                if self._seen[scope] % (now.rate or 1):
                    return False
            if now.count != _UNLIMITED:
                self._count_down(scope)
            return True

    def _layer(self) -> None:
        self._holds = {model: self._effective(model) for model in self._chosen}
        self.on = any(choice.level for choice in self._holds.values())

    def _effective(self, model: str) -> _Choice:
        """Return the settings in effect for ``model``: its own, else the server's, else those of the start."""
        found = self._start
        for choice in (self._chosen[""], self._chosen.get(model, _Choice())):
            said = {field.name: getattr(choice, field.name) for field in fields(choice)}
            found = replace(found, **{name: value for name, value in said.items() if value is not None})
        return found

    def _count_down(self, scope: str) -> None:
        """Decrement the count of traces: the model's, or the server's if the model has none."""
        whose = scope if self._chosen[scope].count is not None else ""
        choice = self._chosen[whose]
        self._chosen[whose] = replace(choice, count=(choice.count or 0) - 1)
        self._layer()

    def _changed(self, choice: _Choice, name: str, values: tuple[str, ...]) -> _Choice:
        if name == "trace_level":
            return replace(choice, level=self._level(values))
        if name == "trace_rate":
            return replace(choice, rate=_number(name, values, 1))
        if name == "trace_count":
            return replace(choice, count=_number(name, values, _UNLIMITED))
        if name not in _FIXED:
            raise InvalidRequest(f"unknown trace setting {quoted(name)}; the settings are {', '.join(_NAMES)}")
        fixed, why = _FIXED[name]
        if values not in ((), (fixed,)):
            raise InvalidRequest(f"{name} cannot be changed: {why}")
        return choice

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
