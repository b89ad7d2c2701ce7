"""An error that does not name the source gets its name, also one for lack of memory or of stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from bf16kit.messages.errors import Bf16kitError, ConversionError, RuntimeFailure, UsageError
from converter.process.naming import prefix_errors

SOURCE = Path("models/m.onnx")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ConversionError("step 'fold': no"), "models/m.onnx: step 'fold': no"),
        (RuntimeFailure("cannot load cpu.onnx"), "models/m.onnx: cannot load cpu.onnx"),
        (ConversionError("m.onnx: damaged"), "m.onnx: damaged"),
        (UsageError("--out: no"), "--out: no"),
        (MemoryError(), "models/m.onnx: out of memory; it needs more than this machine has free"),
        (RecursionError(), "models/m.onnx: nested too deeply to be converted"),
    ],
)
def test_an_error_names_its_source(raised: Exception, said: str) -> None:
    with pytest.raises(Bf16kitError) as found, prefix_errors(SOURCE):
        raise raised
    assert str(found.value) == said
    assert isinstance(found.value, type(raised) if isinstance(raised, Bf16kitError) else ConversionError)
