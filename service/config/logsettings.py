"""The log settings that can be changed while the server runs, under Triton's names."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import quoted
from service.config.logs import Format, adjust

_log = logging.getLogger(__name__)
#: Triton's names of the log formats, and our own. Triton's ISO8601 is our text, whose times are in ISO 8601.
_FORMATS: Mapping[str, Format] = {"ISO8601": "text", "text": "text", "json": "json"}
_NAMES: Mapping[Format, str] = {"text": "ISO8601", "json": "json"}
_LEVELS = {
    logging.INFO: "log_info",
    logging.WARNING: "log_warning",
    logging.ERROR: "log_error",
    logging.DEBUG: "log_verbose_level",
}
_LARGEST_LEVEL = 2**32 - 1  # of Triton's uint32
_Value = bool | int | str


class LogSettings:
    """The server's log settings: see :class:`service.operations.Settings`.

    ``level`` and ``kind`` are the arguments of :func:`~service.config.logs.configure`; a setting without a value
    returns to them. ``log_verbose_level`` of 1 or more is DEBUG, with a line per request. The other levels are switched
    on and off separately.
    """

    def __init__(self, level: str, kind: Format) -> None:
        lowest = logging.getLevelNamesMapping()[level.upper()]
        self._defaults: dict[str, _Value] = {"log_file": ""}  # empty: standard error
        self._defaults |= {name: lowest <= number for number, name in _LEVELS.items()}
        self._defaults |= {"log_verbose_level": int(lowest <= logging.DEBUG), "log_format": _NAMES[kind]}
        self._values = dict(self._defaults)
        self._lock = threading.Lock()

    def update(self, changes: Mapping[str, Sequence[_Value]], model: str = "") -> Mapping[str, Sequence[_Value]]:
        """See :meth:`service.operations.Settings.update`. Models have no log settings of their own."""
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
            return _NAMES[_FORMATS[str(value)]]
        if name == "log_file" and value != default:
            raise InvalidRequest("log_file cannot be changed over the network; redirect standard error to a file")
        if type(value) is not type(default) or (isinstance(value, int) and not 0 <= value <= _LARGEST_LEVEL):
            expected = "true or false (bool_param)" if isinstance(default, bool) else "0 (off) or more (uint32_param)"
            raise InvalidRequest(f"{name} is {quoted(str(value))}; give {expected}")
        return value


def _levels(values: Mapping[str, _Value]) -> frozenset[int]:
    """Return the levels that are logged."""
    return frozenset(level for level, name in _LEVELS.items() if values[name])
