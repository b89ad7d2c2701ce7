"""Results of the kernel's benchmarks as they are published: the pages' text from them.

:mod:`bench.report` puts what the public functions here make of the results into the pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

from bench.core.publishing import Published
from bench.kernel.compare import best
from bench.kernel.sides import path_of

NAMES = ("kernel", "kernel_minilm", "kernel_lm", "kernel_drift")
_COMPARED = ("kernel", "kernel_minilm", "kernel_lm")
# A column of two sides is one of a peer's: at its defaults, and at its best.
_COLUMNS = {
    "ONNX Runtime fp32": ("ONNX Runtime fp32, spinning off", "ONNX Runtime fp32, spinning in runs"),
    "OpenVINO fp32": ("OpenVINO fp32, latency",),
    "torch fp32": ("torch fp32, compiled",),
    "OpenVINO bf16": ("OpenVINO bf16, latency",),
    "torch bf16": ("torch bf16, compiled",),
}
_FASTER, _SAME, _SLOWER = "faster", "same", "slower"
NOTHING = "Not measured yet by `make bench-kernel` on a quiet machine from a clean commit.\n"


def measured(of: Published, *names: str) -> Iterator[Mapping[str, Any]]:
    """What the benchmarks ``names`` found."""
    for name in names:
        yield from of.contents.get(name, {}).get("measurements", ())


# --- the claim --------------------------------------------------------------------------------------------------------


def claim(found: Sequence[Published]) -> str:
    """What the tables support, and no more."""
    return "".join(map(_claim, _kernels(found))) or NOTHING


def _kernels(found: Sequence[Published]) -> list[Published]:
    """Of the machines on which the layers were measured."""
    return [one for one in found if "kernel" in one.contents]


def _cases(of: Published) -> dict[str, list[str]]:
    """Work and ratio of each comparison with the best fp32 peer, by its outcome."""
    by: dict[str, list[str]] = {_FASTER: [], _SAME: [], _SLOWER: []}
    for one in _against(of, "best fp32 peer ÷ cpu"):
        work = one["name"].partition(": ")[0]
        by[_outcome(one)].append(f"{work} ({one['value']:.2f})")
    return by


def _claim(of: Published) -> str:
    by = _cases(of)
    count = sum(map(len, by.values()))
    title = "Faster than fp32 on CPUs" + (
        "" if len(by[_FASTER]) == count else f" in {len(by[_FASTER])} of {count} cases"
    )
    results = [
        f"Time of the fastest of ONNX Runtime, OpenVINO and torch in fp32 ÷ ours, {_where(of)}: {_list(by[_FASTER])}"
    ]
    results += [f"no difference seen: {_list(by[_SAME])}"] if by[_SAME] else []
    results += [f"slower: {_list(by[_SLOWER])}"] if by[_SLOWER] else []
    text = f"**{title}.** {'; '.join(results)}."
    return fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _against(of: Published, what: str) -> list[Mapping[str, Any]]:
    """Measurements of ``what`` that are there; of work with warm and cold caches, the warm."""
    found = [one for one in measured(of, *_COMPARED) if one["name"].endswith(f": {what}") and "absent" not in one]
    return [one for one in found if ", cold: " not in one["name"]]


def _outcome(one: Mapping[str, Any]) -> str:
    low, high = one["interval"]
    if low is not None and low > 1:
        return _FASTER
    return _SLOWER if high is not None and high < 1 else _SAME


def _where(of: Published) -> str:
    """The machine, the date and the commit; those of other results behind them, if they differ."""
    newest = of.contents["kernel"]["machine"]
    dated = {name: of.contents[name]["machine"] for name in NAMES if name in of.contents}
    others = [f"{name}: {_when(each)}" for name, each in dated.items() if each["commit"] != newest["commit"]]
    behind = f" ({'; '.join(others)})" if others else ""
    return f"{newest['cores']} cores of {newest['cpu']} ({of.key}), {_when(newest)}{behind}"


def _when(machine: Mapping[str, Any]) -> str:
    return f"{machine['date']}, commit {machine['commit']}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nowhere"


# --- the tables -------------------------------------------------------------------------------------------------------


def tables(found: Sequence[Published]) -> str:
    """Times, which goals were missed, and where others win, of every kind of machine."""
    return "\n".join(map(_tables, _kernels(found))) or NOTHING


def _tables(of: Published) -> str:
    settings = of.contents["kernel"]["settings"]
    processes = settings["processes"]
    further = settings.get("processes_of_contenders", processes)
    several = f"{processes} fresh processes of each" + (f", {further} of contenders" if further > processes else "")
    lines = [
        f"**{_where(of)}.** Milliseconds, medians of {several}; of a peer: at its defaults ·"
        " at the best of all its settings. The fastest is bold. Layers and the language model with cold caches.",
        "",
        *_times(of),
        "",
        _missed(of),
        "",
        _others(of),
    ]
    return "\n".join(lines) + "\n"


def _times(of: Published) -> Iterator[str]:
    yield f"| | `cpu` | `cpu-bf16` | {' | '.join(_COLUMNS)} |"
    yield "|---" * (3 + len(_COLUMNS)) + "|"
    for name in _COMPARED:
        for grid in of.contents.get(name, {}).get("grids", ()):
            for label, row in grid["rows"].items():
                times = {side: ms for side, ms in zip(grid["columns"], row, strict=True) if ms is not None}
                yield _row(label, times)


def _row(label: str, times: Mapping[str, float]) -> str:
    samples = {name: [[[ms]]] for name, ms in times.items()}
    paths = [path_of(profile, samples) for profile in ("cpu", "cpu-bf16")]
    cells = [[times[path]] if path else [] for path in paths]
    for default, tuned in _COLUMNS.items():
        at_best = min((times[name] for name in (default, *tuned) if name in times), default=None)
        cells.append([ms for ms in (times.get(default), at_best) if ms is not None])
    fastest = min(ms for cell in cells for ms in cell)
    return f"| {label} | {' | '.join(' · '.join(_ms(ms, fastest) for ms in cell) or '–' for cell in cells)} |"


def _ms(ms: float, fastest: float) -> str:
    text = f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
    return f"**{text}**" if ms == fastest else text


def _missed(of: Published) -> str:
    """How many goals came to what, and each that was missed."""
    judged = [one for one in measured(of, *NAMES) if _goal(one) and "absent" not in one]
    verdicts = Counter(one["verdict"] for one in judged)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    absent = sum(1 for one in measured(of, *NAMES) if _goal(one)) - len(judged)
    counts += f", {absent} not measured" * bool(absent)
    missed = [f"{one['name']} {_value(one)} ({_goal(one)})" for one in judged if one["verdict"] == "missed"]
    return f"Of the goals below: {counts}. Missed: {'; '.join(missed) or 'none'}."


# --- the goals --------------------------------------------------------------------------------------------------------


def goals(found: Sequence[Published]) -> str:
    """Every goal with its verdict, of every kind of machine."""
    return "\n".join(map(_goals, _kernels(found))) or NOTHING


def _goals(of: Published) -> str:
    lines = [
        f"**{_where(of)}.** Time of the peer ÷ ours, with an interval of 95 % over processes; of a limit, the share"
        " that is reached. What has a goal inside its interval is undecided.",
        "",
        "| | measured | goal | |",
        "|---|---|---|---|",
        *(_verdict(one) for one in measured(of, *NAMES) if _goal(one)),
    ]
    return "\n".join(lines) + "\n"


def _goal(one: Mapping[str, Any]) -> str:
    """What a measurement is held to; empty where it is held to nothing."""
    if "at_least" in one:
        return f"≥ {one['at_least']:g}"
    return f"≤ {one['at_most']:g}" if "at_most" in one else ""


def _verdict(one: Mapping[str, Any]) -> str:
    if "absent" in one:
        return f"| {one['name']} | – | {_goal(one)} | not measured: {one['absent']} |"
    spread = f" [{_bound(one['interval'][0])}, {_bound(one['interval'][1])}]" if "interval" in one else ""
    judged = one["verdict"] if one["verdict"] == "met" else f"**{one['verdict']}**"
    against = f", {one['detail']}" if one.get("detail") else ""
    return f"| {one['name']}{against} | {_value(one)}{spread} | {_goal(one)} | {judged} |"


def _value(one: Mapping[str, Any]) -> str:
    return f"{one['value']:.3g} {one['unit']}".rstrip()


def _bound(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _others(of: Published) -> str:
    """Where another program is faster than both of our profiles, whatever its arithmetic."""
    won = []
    for name in _COMPARED:
        for grid in of.contents.get(name, {}).get("grids", ()):
            for label, row in grid["rows"].items():
                samples = {s: [[[ms]]] for s, ms in zip(grid["columns"], row, strict=True) if ms is not None}
                peer = best("best peer", samples)
                ours = [path for profile in ("cpu", "cpu-bf16") if (path := path_of(profile, samples))]
                if peer and ours and samples[peer][0][0][0] < min(samples[path][0][0][0] for path in ours):
                    won.append(f"{label} ({peer})")
    return f"Where another program is the fastest of all, by the medians: {_list(won)}."
