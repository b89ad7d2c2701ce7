"""Warnings in the log about the numerics and the speed of a loaded model, with a remedy."""

from __future__ import annotations

import logging

from bf16kit.runtime import RuntimeInfo

_log = logging.getLogger(__name__)


class AdviceLog:
    """Logs each remedy once: other models on this machine usually need the same one."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, label: str, info: RuntimeInfo) -> None:
        """Log the warnings about a loaded model. ``label`` is the model's name in the log."""
        if info.accumulation != "fp32":
            _log.warning("%s: the accumulation probe found %s, not fp32", label, info.accumulation)
        if info.advice and info.note not in self._logged:
            self._logged.add(info.note)
            _log.warning("%s: %s", info.note, info.advice)
