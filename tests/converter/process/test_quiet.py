"""Users do not see what libraries print, warn and log, and the previous state is restored afterwards."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from converter.process.quiet import first_line, quiet


def test_nothing_reaches_the_terminal(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    handler = logging.StreamHandler(sys.stderr)  # created before, like torch's, so it holds the real stream
    logger = logging.getLogger("a.library")
    logger.addHandler(handler)
    try:
        with quiet():
            sys.stdout.write("printed")
            sys.stderr.write("printed")
            warnings.warn("warned", UserWarning, stacklevel=1)
            logger.warning("logged")
    finally:
        logger.removeHandler(handler)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_streams_and_levels_are_restored_also_after_an_error() -> None:
    before = sys.stdout, sys.stderr, logging.root.manager.disable, list(warnings.filters)
    with pytest.raises(ZeroDivisionError), quiet():
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr, logging.root.manager.disable, list(warnings.filters)) == before


def test_the_first_line_of_an_error_names_its_type() -> None:
    assert first_line(ValueError("\n  what\nand much advice")) == "ValueError: what"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("conflicts:\n- seq is 7\n- and more")) == "ValueError: conflicts: seq is 7"


def test_an_error_in_a_torchscript_program_is_shown_without_its_traceback() -> None:
    said = (
        "The following operation failed in the TorchScript interpreter.\nTraceback of TorchScript:"
        "\n    return torch.linear(x)\n           ~~~~~~ <--- HERE\nRuntimeError: mat1 and mat2\n"
    )
    assert first_line(RuntimeError(said)) == "RuntimeError: mat1 and mat2"
