"""Reports of a run: a table in Markdown, JUnit's XML, JSON, and text."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from oip_conformance.suite import Check, Level
from oip_conformance.target import brief


class Outcome(enum.Enum):
    """The outcome of a check. ``WARNED``: a rule of level SHOULD was broken."""

    PASSED = "pass"
    FAILED = "FAIL"
    WARNED = "told"
    SKIPPED = "skip"


@dataclass(frozen=True, slots=True)
class Result:
    """A check, its outcome, and the details. ``seconds`` is how long it took."""

    check: Check
    outcome: Outcome
    seconds: float
    sent: str = ""
    expected: str = ""
    actual: str = ""
    reason: str = ""

    @property
    def details(self) -> str:
        """Why it was skipped, or what was expected and came."""
        return self.reason or (f"expected {self.expected}; came {self.actual}" if self.expected else "")


def failed(results: Sequence[Result]) -> bool:
    """Return whether the server broke a rule of level MUST or TRITON."""
    return any(result.outcome is Outcome.FAILED for result in results)


def summary(results: Sequence[Result]) -> str:
    """Return the counts in one line."""
    seen = Counter(result.outcome for result in results)
    levels = Counter(result.check.level for result in results if result.outcome is Outcome.FAILED)
    which = f" ({levels[Level.MUST]} MUST, {levels[Level.TRITON]} TRITON)" if seen[Outcome.FAILED] else ""
    seconds = sum(result.seconds for result in results)
    return (
        f"{seen[Outcome.PASSED]} passed, {seen[Outcome.FAILED]} failed{which}, {seen[Outcome.WARNED]} told,"
        f" {seen[Outcome.SKIPPED]} skipped, of {len(results)} checks in {seconds:.1f} s"
    )


def lines(results: Sequence[Result], *, all_of_them: bool = False) -> str:
    """Return the broken rules, each with what was sent, expected and received, and the summary."""
    parts = []
    for result in results:
        head = f"{result.outcome.value}  {result.check.id}  [{result.check.level.value}]"
        if result.outcome in (Outcome.FAILED, Outcome.WARNED):
            parts.append(
                f"{head}\n  rule      {result.check.rule} ({result.check.source})\n  sent      {brief(result.sent)}\n"
                f"  expected  {result.expected}\n  came      {brief(result.actual)}"
            )
        elif all_of_them:
            parts.append(head + (f"  {result.reason}" if result.reason else ""))
    return "\n".join([*parts, summary(results)])


def table(results: Sequence[Result], server: str) -> str:
    """Return a table in Markdown with a row for each check."""
    rows = [
        f"# Conformance of {server}\n\n{summary(results)}\n",
        "| check | level | result | rule | what came |\n|---|---|---|---|---|",
    ]
    for result in results:
        check = result.check
        texts = (f"`{check.id}`", check.level.value, result.outcome.value, check.rule, result.details)
        rows.append("| " + " | ".join(map(cell, texts)) + " |")
    return "\n".join(rows) + "\n"


def as_json(results: Sequence[Result], server: str) -> str:
    """Return everything as JSON for programs: the server, and each check with its level, rule and outcome."""
    checks = [
        {
            "id": result.check.id,
            "level": result.check.level.value,
            "source": result.check.source,
            "rule": result.check.rule,
            "extension": result.check.needs,
            "outcome": result.outcome.value,
            "sent": brief(result.sent, 2000),
            "expected": result.expected,
            "came": brief(result.actual, 2000),
            "why": result.reason,
        }
        for result in results
    ]
    return json.dumps({"server": server, "checks": checks}, indent=1, ensure_ascii=False) + "\n"


def junit(results: Sequence[Result], server: str) -> bytes:
    """Return JUnit's XML: a case for each check; broken SHOULD rules are in the system output."""
    counts = Counter(result.outcome for result in results)
    suite = ElementTree.Element(
        "testsuite",
        name=f"conformance of {server}",
        tests=str(len(results)),
        failures=str(counts[Outcome.FAILED]),
        errors="0",
        skipped=str(counts[Outcome.SKIPPED]),
    )
    for result in results:
        group, _, name = result.check.id.partition(".")
        case = ElementTree.SubElement(suite, "testcase", classname=group, name=name, time=f"{result.seconds:.3f}")
        text = _printable(f"{result.check.rule}\nsent: {brief(result.sent)}\n{result.details}")
        if result.outcome is Outcome.FAILED:
            ElementTree.SubElement(case, "failure", message=_printable(result.details)[:500]).text = text
        elif result.outcome is Outcome.SKIPPED:
            ElementTree.SubElement(case, "skipped", message=_printable(result.reason))
        elif result.outcome is Outcome.WARNED:
            ElementTree.SubElement(case, "system-out").text = text
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def cell(text: str, most: int = 160) -> str:
    """Return a text in one line for a table in Markdown, cut short."""
    return brief(text, most).replace("|", "\\|").replace("<", "&lt;")


def _printable(text: str) -> str:
    return "".join(c if c in "\n\t" or c >= " " else "\N{REPLACEMENT CHARACTER}" for c in text)
