"""The README has every check, with its rule and level, and the right numbers."""

from __future__ import annotations

import re
from pathlib import Path

from test_wrong_servers import WRONG

from oip_conformance.checks import CHECKS
from oip_conformance.reports import cell

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def test_the_table_has_every_rule_in_order() -> None:
    rows = re.findall(r"^\| (`[\w.-]+` .+?) \| (\w+) \|", README.partition("## Every rule")[2], re.MULTILINE)
    assert rows == [(f"`{c.id}` {cell(c.rule, 400)}", c.level.value) for c in CHECKS if "/" not in c.id]


def test_the_numbers_are_right() -> None:
    assert f"{len(CHECKS)} checks" in README
    assert f"{len(WRONG)}\nvariants" in README
    for counts in re.findall(r"^\| [^|]+((?: \| \d+){5}) \|$", README, re.MULTILINE):
        assert sum(map(int, re.findall(r"\d+", counts))) == len(CHECKS)
