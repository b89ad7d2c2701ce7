"""The devices a model can run on, by the names users give them."""

from __future__ import annotations

import re

from bf16kit.messages.errors import ConfigError

CPU = "cpu"
_CUDA = re.compile(r"cuda(?::(\d{1,3}))?")


def canonical(device: str) -> str:
    """``cpu`` or ``cuda:N``; plain ``cuda`` is ``cuda:0``. Raises :class:`ConfigError` for any other text."""
    if device == CPU:
        return device
    found = _CUDA.fullmatch(device)
    if found is None:
        raise ConfigError(f"unknown device {device!r}; devices are cpu and cuda:N, as in cuda:0")
    return f"cuda:{int(found[1] or 0)}"


def cuda_index(device: str) -> int | None:
    """``N`` of a canonical ``cuda:N``, None for the CPU."""
    return None if device == CPU else int(device.removeprefix("cuda:"))
