"""Text for terminals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bf16kit.artifact import Artifact
from converter.report.text import printable, table


def test_a_title_stays_on_its_line_however_narrow_the_table() -> None:
    title = "Drift from the fp32 reference on " + "many samples, " * 10
    assert table(title, ("a",), [(1,)]).splitlines()[0] == title


def test_numbers_have_three_digits_and_none_is_a_dash() -> None:
    assert table("t", ("a", "b", "c"), [(0.123456, None, 123456)]).split()[-3:] == ["0.123", "–", "123456"]


def test_markup_and_control_characters_in_names_are_shown_and_not_obeyed() -> None:
    shown = table("t", ("a",), [("[bold]x[/bold]\x1b[31m\r\n",)])
    assert "[bold]x[/bold]\\x1b[31m\\r\\n" in shown


def test_control_characters_are_written_out_but_for_ends_of_lines() -> None:
    assert printable("é\x1b\n\udcff") == "é\\x1b\n\\udcff"


def test_a_long_name_is_folded_and_never_cut() -> None:
    shown = table("t", ("a", "b"), [("x" * 500, "end")])
    assert shown.count("x") == 500
    assert "end" in shown


def test_a_terminal_that_cannot_show_every_character_is_told_all_the_same(small: Artifact) -> None:
    command = [str(Path(sys.executable).with_name("bf16-convert")), "inspect", str(small.path)]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"0.5" in done.stdout
