"""``python -m bench NAME …``: run benchmarks, print a table, write
``bench/results/MACHINE/NAME.json``, MACHINE being the kind of machine it is.

Each benchmark runs in a process of its own, one after the other, so that none inherits another's threads or memory.
``python -m bench readme`` measures what README shows, and writes README and the documentation from it. When the result
of one of them is not published, run that one again at the same commit, then ``python -m bench.report``.
``python -m bench all --quick`` shows that each still runs.

Exit code 1 when a benchmark failed or its result is not fit to be published (:mod:`bench.core.publishing`): it is
printed, and kept in ``build/bench``. Goals that are missed are results like others.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import report
from bench.core import machine, publishing, results
from bench.core.workspace import Workspace

MODULES = {
    "artifact_size": "conversion.artifact_size",
    "conversion_speed": "conversion.speed",
    "memory": "serving.memory",
    "served": "serving.served",
    "throughput_minilm": "serving.throughput",
    "drift_overhead": "serving.drift_overhead",
    "overload": "serving.overload",
    "peers_mlp": "peers.mlp",
    "minilm": "kernel.minilm:measure_short",
    "kernel": "kernel.layers",
    "kernel_minilm": "kernel.minilm",
    "kernel_lm": "kernel.lm",
    "kernel_drift": "kernel.drift",
    "gpu": "gpu.gpu",
}
README, EVERY = "readme", "all"
GROUPS: Mapping[str, Sequence[str]] = {README: report.HEADLINES, EVERY: tuple(MODULES)}
ELSEWHERE = ("gpu", "peers_mlp")  # need a GPU, and packages of other servers: where these are missing, nothing is wrong
UNPUBLISHED = machine.ROOT / "build" / "bench"  # where results go that are not fit to be published


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    chosen = _parser().parse_args(arguments)
    if chosen.workspace is not None:
        return _run(chosen, chosen.workspace)
    with tempfile.TemporaryDirectory(prefix="bf16kit-bench-") as workspace:
        return _run(chosen, Path(workspace))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of bf16kit.")
    groups = f"{README}: what README shows; {EVERY}: all of them"
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(MODULES)}; or {groups}")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it runs; writes no results")
    parser.add_argument("--workspace", type=Path, help="keep converted models here for the next run")
    parser.add_argument("--results", type=Path, default=results.here(), help="where results go, bench/results/MACHINE")
    return parser


def _run(chosen: argparse.Namespace, workspace: Path) -> int:
    names = GROUPS.get(chosen.names[0], chosen.names) if len(chosen.names) == 1 else chosen.names
    if unknown := sorted(set(names) - MODULES.keys()):
        alone = (
            f"{unknown[0]!r} is not combined with others" if unknown[0] in GROUPS else f"no benchmark {unknown[0]!r}"
        )
        print(f"{alone}; there are {', '.join((*GROUPS, *MODULES))}", file=sys.stderr)
        return 2
    if len(names) == 1:
        return _measure(names[0], Workspace(workspace), chosen)
    flags = ["--workspace", str(workspace), "--results", str(chosen.results), *(["--quick"] if chosen.quick else [])]
    ended = {
        name: subprocess.run([sys.executable, "-m", "bench", name, *flags], check=False).returncode for name in names
    }
    status = int(any(ended.values()))  # that of a process which a signal ended is negative
    if status:
        print(f"failed: {', '.join(name for name, code in ended.items() if code)}", file=sys.stderr)
    if chosen.names == [README] and not chosen.quick:  # the pages follow what is published, which may be less
        print(report.numbers([publishing.read(chosen.results)]))
        return max(status, report.main(["--results", str(chosen.results.parent)]))
    return status


def _function(name: str) -> Callable[..., results.Result]:
    """What measures it: ``measure`` of its module, or what is named after a colon."""
    module, _, function = MODULES[name].partition(":")
    found: Callable[..., results.Result] = getattr(importlib.import_module(f"bench.{module}"), function or "measure")
    return found


def _measure(name: str, workspace: Workspace, chosen: argparse.Namespace) -> int:
    machine.adopt_orphans()
    described, others = machine.describe(), machine.OtherProgramsTime()
    result: results.Result = _function(name)(workspace, quick=chosen.quick)
    for grid in result.grids:
        print(grid.text(), end="\n\n", flush=True)
    print(results.table(result), flush=True)
    for note in result.notes:
        print(f"  ({note})", flush=True)
    described |= others.shares() | {"clean": described["clean"] and machine.unchanged(described)}
    command = f"python -m bench {name}{' --quick' * chosen.quick}"
    content = results.content_of(result, command=command, machine=described)
    if result.skipped:
        return int(name not in ELSEWHERE)
    if reason := publishing.unfit(content):
        print(f"  (not published: {reason}; see {results.write(content, UNPUBLISHED)})")
        return 0 if chosen.quick else 1
    print(f"  ({results.write(content, chosen.results)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
