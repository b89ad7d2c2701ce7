"""``python -m bench [NAME …]``: run benchmarks, print a table, write ``bench/results/NAME.json``.

Each benchmark runs in a process of its own, one after the other, so that none inherits another's threads or memory.
Exit code 0 when every target is met, 1 when one is missed or a benchmark failed. The numbers are worth no more than the
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

from bench import machine, results
from bench.workspace import Workspace

NAMES = (
    "artifact_size",
    "conversion_memory",
    "drift_minilm",
    "startup",
    "latency_mlp",
    "throughput_minilm",
    "gpu",
)
RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    chosen = _parser().parse_args(arguments)
    if chosen.workspace is not None:
        return _run(chosen.names, chosen.workspace, quick=chosen.quick)
    with tempfile.TemporaryDirectory(prefix="bf16kit-bench-") as workspace:
        return _run(chosen.names, Path(workspace), quick=chosen.quick)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of bf16kit.")
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it runs; writes no results")
    parser.add_argument("--workspace", type=Path, help="keep converted models here for the next run")
    return parser


def _run(names: Sequence[str], workspace: Path, *, quick: bool) -> int:
    if len(names) == 1:
        return _measure(names[0], Workspace(workspace), quick=quick)
    flags = ["--workspace", str(workspace), *(["--quick"] if quick else [])]
    codes = [
        subprocess.run([sys.executable, "-m", "bench", name, *flags], check=False).returncode for name in names or NAMES
    ]
    return max(codes)


def _measure(name: str, workspace: Workspace, *, quick: bool) -> int:
    described = machine.describe()
    result: results.Result = importlib.import_module(f"bench.{name}").measure(workspace, quick=quick)
    print(results.table([result]), flush=True)
    for note in result.notes:
        print(f"  ({note})", flush=True)
    if not quick:
        results.write(result, RESULTS, command=f"python -m bench {name}", machine=described)
    return 1 if result.missed else 0


if __name__ == "__main__":
    sys.exit(main())
