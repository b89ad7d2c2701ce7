"""The paths of the CPU kernel, as tests ask for them."""

from __future__ import annotations

import pytest

from bf16kit.errors import ConfigError
from bf16kit.runtime import kernel


def use(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sessions use ``path`` from now on; the test is skipped where the processor cannot."""
    monkeypatch.setenv(kernel.VARIABLE, path)
    try:
        kernel.available()
    except ConfigError as error:
        pytest.skip(str(error))
