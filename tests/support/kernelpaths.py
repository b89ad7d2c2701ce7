"""Selects a code path of the CPU kernel for a test."""

import pytest

from bf16kit.messages.errors import ConfigError
from bf16kit.runtime.ort import kernel


def use(path: str, monkeypatch: pytest.MonkeyPatch, *, rounds: bool = False) -> None:
    """Make sessions use ``path`` for the rest of the test. Skip the test if the processor lacks what it needs."""
    monkeypatch.setenv(kernel.VARIABLE, path)
    try:
        kernel.usable_kernel(rounds=rounds)
    except ConfigError as error:
        pytest.skip(str(error))
