"""The tests of runtimes choose the kernel's path themselves."""

import pytest

from bf16kit.runtime.ort import kernel


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel.VARIABLE, raising=False)
