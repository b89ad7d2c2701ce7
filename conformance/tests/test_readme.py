"""The README has every topic of checks, and the right numbers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from test_wrong_servers import WRONG

from oip_conformance.checks import CHECKS

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def test_the_table_has_every_topic_with_its_number_of_checks() -> None:
    topics = Counter(check.id.partition(".")[0] for check in CHECKS)
    rows = re.findall(r"^\| (`.+?`) \| (\d+) \|", README.partition("## What is checked")[2], re.MULTILINE)
    found = {tuple(re.findall(r"`(\w+)`", names)): int(number) for names, number in rows}
    assert found == {names: sum(topics[name] for name in names) for names in found}
    assert sorted(name for names in found for name in names) == sorted(topics)


def test_the_numbers_are_right() -> None:
    assert f"{len(CHECKS)} checks" in README
    assert f"{len(WRONG)}\nvariants" in README
    for counts in re.findall(r"^\| [^|]+((?: \| \d+){5}) \|$", README, re.MULTILINE):
        assert sum(map(int, re.findall(r"\d+", counts))) == len(CHECKS)
