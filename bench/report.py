"""``python -m bench.report``: what README and the documentation quote of the published results.

Measures nothing. ``bench/results`` is read through the gate (:mod:`bench.core.publishing`); what stands between the
marks of a page is what the functions here make of it, and a test compares the two.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core import publishing
from bench.core.cells import alone, goal, lines, row, value
from bench.core.machine import ROOT
from bench.core.publishing import Published
from bench.core.results import RESULTS
from bench.kernel import published as kernel
from bench.serving import sizing

# The goals: what each is called on the page, the benchmark, the measurement.
ROWS: Sequence[tuple[str, str, str]] = (
    ("artifact on disk ÷ checkpoint; fp32 can be restored bit for bit", "artifact_size", "artifact ÷ checkpoint"),
    ("artifact on disk with `--no-residual` ÷ checkpoint", "artifact_size", "without the residual ÷ checkpoint"),
    ("memory of the server, between runs of the fp32 reference", "memory", "bf16-serve with its defaults"),
    ("the same ÷ a bare gRPC handler around ONNX Runtime fp32", "memory", "defaults ÷ a bare handler"),
    ("the same while the reference runs", "memory", "while its reference runs ÷ a bare handler"),
    ("without live drift (`shadow: {rate: 0}`)", "memory", "without a reference ÷ a bare handler"),
    ("16 tokens: time of the fastest fp32 runtime ÷ `cpu`", "minilm", "MiniLM 1×16: best fp32 peer ÷ cpu"),
    ("16 tokens: time of the fastest bf16 runtime ÷ `cpu-bf16`", "minilm", "MiniLM 1×16: best bf16 peer ÷ cpu-bf16"),
    ("128 tokens: time of the fastest fp32 runtime ÷ `cpu`", "minilm", "MiniLM 1×128: best fp32 peer ÷ cpu"),
    ("128 tokens: time of the fastest bf16 runtime ÷ `cpu-bf16`", "minilm", "MiniLM 1×128: best bf16 peer ÷ cpu-bf16"),
    ("served, one client: p50 ÷ a bare handler, fp32", "served", "MiniLM: p50, bf16-serve ÷ a bare handler"),
    ("the same, 16→16 MLP on both sides", "served", "MLP: p50, bf16-serve ÷ a bare handler"),
    (
        "16 clients of 16 tokens: rate ÷ the runtime alone, same settings",
        "throughput_minilm",
        "16 clients of 1 × 16: served ÷ bare sessions alike",
    ),
    (
        "16 clients of 128 tokens: rate ÷ the runtime alone, same settings",
        "throughput_minilm",
        "16 clients of 1 × 128: served ÷ bare sessions alike",
    ),
    *(
        (f"live drift, {label}: {what} ÷ off", "drift_overhead", f"{case}: {what}, {side}")
        for case, side, label in (
            ("MiniLM, 16 in flight", "defaults", "16 in flight"),
            ("MiniLM, 1 in flight", "defaults", "1 in flight"),
            ("MLP, 16 in flight", "defaults", "16→16 MLP, 16 in flight"),
            ("MiniLM, 16 in flight", "tenth", "a tenth of all requests measured, 16 in flight"),
        )
        for what in ("time per request", "p99")
    ),
    (
        "ten times the capacity asked: answered ÷ capacity",
        "overload",
        "MiniLM: answered under 10 × ÷ capacity",
    ),
    ("ten times the capacity asked: time until a rejection, p50", "overload", "MiniLM: refused p50"),
    (
        "ten times the capacity asked: p99 of the answered ÷ p99 at 80 % load",
        "overload",
        "MiniLM: p99 of the answered, from when sent, ÷ p99 at 80 %",
    ),
)
# README's five numbers: each with its parts, which are called so there, and are measurements of one benchmark.
FIVE: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    (
        "**Disk:** artifact ÷ fp32 checkpoint",
        "artifact_size",
        (("", "artifact ÷ checkpoint"), ("with `--no-residual`", "without the residual ÷ checkpoint")),
    ),
    (
        "**Memory:** the server's ÷ that of a bare gRPC handler with ONNX Runtime fp32",
        "memory",
        (
            ("", "defaults ÷ a bare handler"),
            ("while drift is measured", "while its reference runs ÷ a bare handler"),
            ("drift off", "without a reference ÷ a bare handler"),
        ),
    ),
    (
        "**Speed:** time of the fastest of ONNX Runtime, OpenVINO and torch ÷ ours",
        "minilm",
        (
            ("fp32 ÷ `cpu`, 16 tokens", "MiniLM 1×16: best fp32 peer ÷ cpu"),
            ("128 tokens", "MiniLM 1×128: best fp32 peer ÷ cpu"),
            ("bf16 ÷ `cpu-bf16`, 16 tokens", "MiniLM 1×16: best bf16 peer ÷ cpu-bf16"),
            ("128 tokens", "MiniLM 1×128: best bf16 peer ÷ cpu-bf16"),
        ),
    ),
    (
        "**A served request:** median latency ÷ that of the bare fp32 handler, one client",
        "served",
        (
            ("", "MiniLM: p50, bf16-serve ÷ a bare handler"),
            ("16→16 MLP", "MLP: p50, bf16-serve ÷ a bare handler"),
        ),
    ),
    (
        "**Live drift:** time per request, measured ÷ not, 16 in flight",
        "drift_overhead",
        (
            ("", "MiniLM, 16 in flight: time per request, defaults"),
            ("a tenth of all requests measured", "MiniLM, 16 in flight: time per request, tenth"),
        ),
    ),
)
FURTHEST = 3  # missed goals that README names
#: What ``make bench`` measures, all at one commit.
HEADLINES = tuple(dict.fromkeys(benchmark for _, benchmark, _ in ROWS))
NOTHING = "Not measured yet by `make bench` on a quiet machine from one clean commit.\n"


def five(found: Sequence[Published]) -> str:
    """README's numbers, of every kind of machine that has all goals at one commit."""
    return "\n".join(_five(one) for one in found if one_commit(one)) or NOTHING


def _five(of: Published) -> str:
    text = [f"all-MiniLM-L6-v2 with defaults, {of.where(HEADLINES[0])}; intervals of 95 %:", ""]
    for label, benchmark, parts in FIVE:
        values = ((part, of.find(benchmark, name)) for part, name in parts)
        said = "; ".join(f"{part} {value(one)}".strip() for part, one in values if one and "absent" not in one)
        text.append(lines(f"* {label}: {said or 'not measured'}.", "  "))
    return "\n".join([*text, "", lines(_furthest(of))]) + "\n"


def _furthest(of: Published) -> str:
    """How many goals are missed, and those that are missed by the largest factors."""
    judged = [(label, one) for label, benchmark, name in ROWS if (one := of.find(benchmark, name)) and goal(one)]
    missed = sorted((each for each in judged if each[1].get("verdict") == "missed"), key=_factor, reverse=True)
    named = "; ".join(f"{label} {alone(one)} ({goal(one)})" for label, one in missed[:FURTHEST])
    furthest = f", the furthest: {named}" if named else ""
    return f"Missed: {len(missed)} of {len(judged)} goals ([all](docs/benchmarks.md#goals)){furthest}."


def _factor(missed: tuple[str, Mapping[str, Any]]) -> float:
    _, one = missed
    return float(one["at_least"] / one["value"] if "at_least" in one else one["value"] / one["at_most"])


def numbers(found: Sequence[Published]) -> str:
    """The goals, of every kind of machine that has all of them at one commit."""
    return "\n".join(_numbers(one) for one in found if one_commit(one)) or NOTHING


def one_commit(of: Published) -> bool:
    """Whether all headlines are there, and were measured at one commit."""
    return len({of.contents.get(name, {}).get("machine", {}).get("commit", name) for name in HEADLINES}) == 1


def _numbers(of: Published) -> str:
    text = [
        f"**{of.where(HEADLINES[0])}.**",
        "",
        "| all-MiniLM-L6-v2, defaults | measured | goal | |",
        "|---|---|---|---|",
    ]
    text += [row(label, of.find(benchmark, name)) for label, benchmark, name in ROWS]
    return "\n".join(text) + "\n\n" + _others(of)


def _others(of: Published) -> str:
    """Where another program is faster, by the medians."""
    wins = []
    for one in of.measurements("minilm"):
        work, _, who = one["name"].partition(": the fastest ")
        ours = of.find("minilm", f"{work}: bf16kit") if who else None
        if ours is not None and one["value"] < ours["value"]:
            wins.append(f"{work} ({one['value']:.3g} ms, {who}; we {ours['value']:.3g})")
    return f"Another program is the fastest of all: {', '.join(wins)}.\n" if wins else "No other program is faster.\n"


def results(found: Sequence[Published]) -> str:
    """Everything that is published and not the kernel's, which has a page of its own."""
    return "\n".join(part for of in found for part in _results(of)) or "Nothing yet.\n"


def _results(of: Published) -> Iterator[str]:
    for name, content in of.contents.items():
        if name.startswith("kernel"):
            continue
        text = [
            f"### {name}",
            f"{of.where(name)}, `{content['command']}`",
            "",
            "| | measured | goal | |",
            "|---|---|---|---|",
            *(row(one["name"], one) for one in of.measurements(name)),
        ]
        yield "\n".join(text) + "\n"


Block = Callable[[Sequence[Published]], str]
PAGES: Mapping[str, Mapping[str, Block]] = {
    "README.md": {"numbers": five},
    "docs/benchmarks.md": {"measured": numbers, "results": results},
    "docs/kernel.md": {"claim": kernel.claim, "tables": kernel.tables, "goals": kernel.goals},
    "docs/scaling.md": {"sizing": sizing.table},
}


def written(page: str, text: str, found: Sequence[Published]) -> str:
    """``text``, which is that of ``page``, with what the results say between its marks."""
    for name, block in PAGES[page].items():
        pattern = rf"(<!-- {name}: written by [^>]* -->\n).*?(<!-- end of {name} -->\n)"
        marked = re.findall(pattern, text, re.DOTALL)
        assert len(marked) == 1, f"{page} has {len(marked)} marks for {name}"
        begin, end = marked[0]
        text = re.sub(pattern, lambda _: begin + block(found) + end, text, flags=re.DOTALL)  # noqa: B023 - used at once
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="Pages from the published results.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are, by kind of machine")
    parser.add_argument("--into", type=Path, default=ROOT, help=f"the tree of {', '.join(PAGES)}")
    chosen = parser.parse_args(arguments)
    for directory in sorted(chosen.results.iterdir()):
        for reason in publishing.refusals(directory):
            print(f"not published: {reason}", file=sys.stderr)
    found = publishing.every(chosen.results)
    for name in PAGES:
        page = chosen.into / name
        page.write_text(written(name, page.read_text("utf-8"), found), "utf-8")
    print(f"written: {', '.join(PAGES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
