"""``python -m bench.gpu.registry.placed GRAPH… [--release 1.31.1 …] [--keep DIR]``: where sessions put each node.

Each release's own session is made of each graph with stand-ins for NVIDIA's libraries: it loads the graph, fuses what
it fuses, and gives the nodes to CUDA or the CPU, as it would on a device. Nothing is run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.gpu.registry.__main__ import RELEASES, environment_for, installed_release

_LOADED = Path(__file__).with_name("loaded.py")
_PLACED = re.compile(r"VerifyEachNodeIsAssignedToAnEp\].*? placed on \[(\w+)\]\. Number of nodes: (\d+)")
_NODE = re.compile(r"VerifyEachNodeIsAssignedToAnEp\]\s+(\w+) \(")


class NotLoaded(Exception):
    """What ONNX Runtime said when it refused a graph."""


def placement(graph: Path, site: Path) -> dict[str, Counter[str]]:
    """By provider, how many nodes of each operator the release in ``site`` gives it. NotLoaded where it refuses."""
    command = [sys.executable, str(_LOADED), str(graph)]
    done = subprocess.run(command, env=environment_for(site), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotLoaded(done.stderr.strip().splitlines()[-1][:400] if done.stderr else f"ended with {done.returncode}")
    return parse_placement(done.stderr)


def parse_placement(log: str) -> dict[str, Counter[str]]:
    """What a session's log says of it. Where all nodes are one provider's, it names none: they are under ``""``."""
    found: dict[str, Counter[str]] = {}
    provider = ""
    for line in log.splitlines():
        if (head := _PLACED.search(line)) is not None:
            provider = head[1]
            found[provider] = Counter({"": int(head[2])})
        elif provider and (node := _NODE.search(line)) is not None:
            found[provider][node[1]] += 1
            found[provider][""] -= 1
    return {name: +operators for name, operators in found.items()}


def summary_line(release: str, graph: Path, placement: Mapping[str, Counter[str]]) -> str:
    """One line for people."""
    cuda, cpu = placement.get("CUDAExecutionProvider", Counter()), placement.get("CPUExecutionProvider", Counter())
    there = ", ".join(f"{count} {op}" for op, count in cpu.most_common()) or "none"
    return f"{release}  {graph}: {cuda.total()} nodes on CUDA, {cpu.total()} on the CPU ({there})"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code: 1 where a release refuses a graph."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.registry.placed", description=__doc__)
    parser.add_argument("graphs", nargs="+", type=Path, metavar="GRAPH")
    parser.add_argument("--release", action="append", dest="releases", help="one of them only; may be given again")
    parser.add_argument("--keep", type=Path, help="where fetched releases are, and stay")
    chosen = parser.parse_args(arguments)
    refused = 0
    with tempfile.TemporaryDirectory(prefix="bf16kit-placed-") as scratch:
        for release in chosen.releases or RELEASES:
            site = installed_release(release, chosen.keep or Path(scratch))
            for graph in chosen.graphs:
                try:
                    print(summary_line(release, graph, placement(graph, site)), flush=True)
                except NotLoaded as error:
                    refused += 1
                    print(f"{release}  {graph}: refused: {error}", flush=True)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
