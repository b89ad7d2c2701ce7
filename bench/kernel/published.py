"""Results of the kernel's benchmarks as they are published: the pages' text from them.

:mod:`bench.report` puts what the public functions here make of the results into the pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.core.cells import alone, goal, lines, row
from bench.core.publishing import Published
from bench.kernel.compare import best
from bench.kernel.sides import PROFILES, path_of

_COMPARED = ("kernel", "kernel_minilm", "kernel_lm")
NAMES = (*_COMPARED, "kernel_drift")
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


def claim(found: Sequence[Published]) -> str:
    """What the tables support, and no more."""
    return "".join(map(_claim, _kernels(found))) or NOTHING


def tables(found: Sequence[Published]) -> str:
    """Times, which goals were missed, and where others win, of every kind of machine."""
    return "\n".join(map(_tables, _kernels(found))) or NOTHING


def goals(found: Sequence[Published]) -> str:
    """Every goal with its verdict, of every kind of machine."""
    return "\n".join(map(_goals, _kernels(found))) or NOTHING


def _kernels(found: Sequence[Published]) -> list[Published]:
    """Of the machines on which the layers were measured."""
    return [one for one in found if "kernel" in one.contents]


def _where(of: Published) -> str:
    """The machine, the date and the commit; those of other results behind them, if they differ."""
    newest = of.contents["kernel"]["machine"]["commit"]
    dated = {name: of.contents[name]["machine"] for name in NAMES if name in of.contents}
    others = [f"{name}: {of.when(name)}" for name, each in dated.items() if each["commit"] != newest]
    return of.where("kernel") + (f" ({'; '.join(others)})" if others else "")


def _judged(of: Published) -> list[Mapping[str, Any]]:
    """What is held to a goal."""
    return [one for name in NAMES for one in of.measurements(name) if goal(one)]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nowhere"


def _claim(of: Published) -> str:
    by: dict[str, list[str]] = {_FASTER: [], _SAME: [], _SLOWER: []}
    for one in (one for name in _COMPARED for one in of.measurements(name)):
        work, _, what = one["name"].partition(": ")
        if what == "best fp32 peer ÷ cpu" and "absent" not in one and not work.endswith(", cold"):
            by[_outcome(one)].append(f"{work} ({one['value']:.2f})")
    count, faster = sum(map(len, by.values())), len(by[_FASTER])
    title = "Faster than fp32 on CPUs" + (f" in {faster} of {count} cases" if faster < count else "")
    results = [
        f"Time of the fastest of ONNX Runtime, OpenVINO and torch in fp32 ÷ ours, {_where(of)}: {_list(by[_FASTER])}"
    ]
    results += [f"no difference seen: {_list(by[_SAME])}"] if by[_SAME] else []
    results += [f"slower: {_list(by[_SLOWER])}"] if by[_SLOWER] else []
    return lines(f"**{title}.** {'; '.join(results)}.") + "\n"


def _outcome(one: Mapping[str, Any]) -> str:
    low, high = one["interval"]
    if low is not None and low > 1:
        return _FASTER
    return _SLOWER if high is not None and high < 1 else _SAME


def _tables(of: Published) -> str:
    settings = of.contents["kernel"]["settings"]
    processes = settings["processes"]
    further = settings.get("processes_of_contenders", processes)
    several = f"{processes} fresh processes of each" + (f", {further} of contenders" if further > processes else "")
    text = [
        f"**{_where(of)}.** Milliseconds, medians of {several}; of a peer: at its defaults ·"
        " at the best of all its settings. The fastest is bold. Layers and the language model with cold caches.",
        "",
        f"| | `cpu` | `cpu-bf16` | {' | '.join(_COLUMNS)} |",
        "|---" * (3 + len(_COLUMNS)) + "|",
        *(_times(label, times) for label, times in _pieces(of)),
        "",
        _missed(of),
        "",
        f"Where another program is the fastest of all, by the medians: {_list(list(_others(of)))}.",
    ]
    return "\n".join(text) + "\n"


def _pieces(of: Published) -> Iterator[tuple[str, dict[str, float]]]:
    """Each piece of work, and milliseconds by side."""
    for name in _COMPARED:
        for grid in of.contents.get(name, {}).get("grids", ()):
            for label, cells in grid["rows"].items():
                yield label, {side: ms for side, ms in zip(grid["columns"], cells, strict=True) if ms is not None}


def _times(label: str, times: Mapping[str, float]) -> str:
    cells = [[times[path]] if (path := path_of(profile, times)) else [] for profile in PROFILES]
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
    judged = [one for one in _judged(of) if "absent" not in one]
    verdicts = Counter(one["verdict"] for one in judged)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    absent = len(_judged(of)) - len(judged)
    counts += f", {absent} not measured" * bool(absent)
    missed = [f"{one['name']} {alone(one)} ({goal(one)})" for one in judged if one["verdict"] == "missed"]
    return f"Of the goals below: {counts}. Missed: {'; '.join(missed) or 'none'}."


def _others(of: Published) -> Iterator[str]:
    """Where another program is faster than both of our profiles, whatever its arithmetic."""
    for label, times in _pieces(of):
        peer = best("best peer", times)
        ours = [times[path] for profile in PROFILES if (path := path_of(profile, times))]
        if peer and ours and times[peer] < min(ours):
            yield f"{label} ({peer})"


def _goals(of: Published) -> str:
    text = [
        f"**{_where(of)}.** Time of the peer ÷ ours, with an interval of 95 % over processes; of a limit, the share"
        " that is reached. What has a goal inside its interval is undecided.",
        "",
        "| | measured | goal | |",
        "|---|---|---|---|",
        *(row(", ".join(filter(None, (one["name"], one.get("detail")))), one) for one in _judged(of)),
    ]
    return "\n".join(text) + "\n"
