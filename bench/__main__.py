"""``python -m bench [NAME …]``: run benchmarks, print a table, write
``bench/results/MACHINE/NAME.json``, MACHINE being the kind of machine it is.

Each benchmark runs in a process of its own, one after the other, so that none inherits another's threads or memory.
Exit code 0 when every target is met, 1 when one is missed, a benchmark failed, or its result is not fit to be published
(:mod:`bench.core.publishing`): that one is printed, and kept in ``build/bench``. The numbers are worth no more than the
machine's quiet: stop what else runs.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.core import machine, publishing, results
from bench.core.workspace import Workspace

MODULES = {
    "artifact_size": "conversion.artifact_size",
    "conversion_memory": "conversion.memory",
    "conversion_large": "conversion.large",
    "conversion_torch": "conversion.torch_sources",
    "conversion_speed": "conversion.speed",
    "rounding_speed": "conversion.rounding_speed",
    "drift_minilm": "conversion.drift",
    "startup": "serving.startup",
    "latency_mlp": "serving.latency",
    "cpu_mlp": "serving.cpu",
    "throughput_minilm": "serving.throughput",
    "overload": "serving.overload",
    "workers_memory": "serving.workers_memory",
    "kernel": "kernel.layers",
    "kernel_minilm": "kernel.minilm",
    "kernel_lm": "kernel.lm",
    "kernel_memory": "kernel.memory",
    "kernel_numerics": "kernel.numerics",
    "kernel_drift": "kernel.drift",
    "peers_mlp": "peers.mlp",
    "peers_image": "peers.image",
    "shared_memory": "serving.shared_memory",
    "latency_mixed": "serving.mixed",
    "workers": "serving.workers",
    "ray": "serving.ray",
    "drift_overhead": "serving.drift_overhead",
    "drift_sampling": "serving.drift_sampling",
    "gpu": "gpu.gpu",
    "recovery": "conversion.recovery",
    "calibrated_rounding": "conversion.calibrated_rounding",
    "latency_commits": "serving.latency_commits",
    "drift_detector": "drift.detector",
    "drift_over_budget": "drift.overbudget",
    "drift_fleet": "drift.fleet",
    "image": "deployment.image",
}
UNPUBLISHED = machine.ROOT / "build" / "bench"  # where results go that are not fit to be published
BY_NAME_ONLY = ("calibrated_rounding", "latency_commits")  # what a decision rests on, and no promise
NAMES = tuple(name for name in MODULES if name not in BY_NAME_ONLY)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    chosen = _parser().parse_args(arguments)
    if chosen.workspace is not None:
        return _run(chosen, chosen.workspace)
    with tempfile.TemporaryDirectory(prefix="bf16kit-bench-") as workspace:
        return _run(chosen, Path(workspace))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of bf16kit.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones, of {', '.join(NAMES)}; all of them")
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it runs; writes no results")
    parser.add_argument("--workspace", type=Path, help="keep converted models here for the next run")
    parser.add_argument("--results", type=Path, default=results.here(), help="where results go, bench/results/MACHINE")
    return parser


def _run(chosen: argparse.Namespace, workspace: Path) -> int:
    names = chosen.names or NAMES
    unknown = sorted(set(names) - MODULES.keys())
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    if len(names) == 1:
        return _measure(names[0], Workspace(workspace), chosen)
    flags = ["--workspace", str(workspace), "--results", str(chosen.results), *(["--quick"] if chosen.quick else [])]
    return max(subprocess.run([sys.executable, "-m", "bench", name, *flags], check=False).returncode for name in names)


def _measure(name: str, workspace: Workspace, chosen: argparse.Namespace) -> int:
    machine.adopt_orphans()
    described, others = machine.describe(), machine.OtherProgramsTime()
    result: results.Result = importlib.import_module(f"bench.{MODULES[name]}").measure(workspace, quick=chosen.quick)
    for grid in result.grids:
        print(grid.text(), end="\n\n", flush=True)
    print(results.table([result]), flush=True)
    for note in result.notes:
        print(f"  ({note})", flush=True)
    described |= others.shares()
    command = f"python -m bench {name}{' --quick' * chosen.quick}"
    content = results.content_of(result, command=command, machine=described)
    if result.skipped:
        return 0
    if reason := publishing.unfit(content):
        print(f"  (not published: {reason}; see {results.write(content, UNPUBLISHED)})")
        return 0 if chosen.quick else 1
    print(f"  ({results.write(content, chosen.results)})")
    return 1 if result.missed else 0


if __name__ == "__main__":
    sys.exit(main())
