"""What a model's numbers lack, and what to do about it: for the log."""

from __future__ import annotations

import logging

from bf16kit.runtime import RuntimeInfo

_log = logging.getLogger(__name__)


class Advice:
    """Given once: what one model lacks here, others do too."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def give(self, label: str, info: RuntimeInfo) -> None:
        """``label`` names the model that was loaded."""
        if info.accumulation != "fp32":
            _log.warning("%s: the accumulation probe found %s, not fp32", label, info.accumulation)
        if info.advice and info.note not in self._given:
            self._given.add(info.note)
            _log.warning("%s: %s", info.note, info.advice)
