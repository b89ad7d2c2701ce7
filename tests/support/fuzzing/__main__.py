"""``python -m fuzzing``: convert 20,000 mutants in slices, one slice per core, and write the page with the outcomes.

A slice that already has a result file is not run again, so a stopped campaign continues where it stopped. The page is
written after each slice, so it is right for a campaign that is stopped early.

``python -m fuzzing KIND FIRST COUNT RESULT`` runs one slice.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzzing import page

SHARES = {"onnx": 0.35, "safetensors": 0.25, "torch": 0.25, "flax": 0.1, "orbax": 0.05}
SLICE = 500


def main(arguments: list[str]) -> int:
    if arguments[:1] and arguments[0] in SHARES:
        return _slice(arguments[0], int(arguments[1]), int(arguments[2]), Path(arguments[3]))
    parser = argparse.ArgumentParser(prog="python -m fuzzing")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path, default=Path("build/fuzz"), help="a file for each slice")
    parser.add_argument("--page", type=Path, default=Path("docs/reliability-converter.md"))
    given = parser.parse_args(arguments)
    commit = page.commit()
    slices = _slices(given.count, given.results / commit)
    with ThreadPoolExecutor(given.jobs) as pool:
        done = []
        for finished in pool.map(_apart, slices):
            done.append(finished)
            tallies = [json.loads(result.read_text()) for *_, result in slices if result.is_file()]
            page.write(given.page, tallies, commit)
    faults = sum(len(tally["faults"]) for tally in tallies)
    print(f"{sum(tally['count'] for tally in tallies)} mutants, {faults} faults: {given.page}")
    return bool(faults) or not all(done)


def _slices(count: int, results: Path) -> list[tuple[str, int, int, Path]]:
    """Return the slices, alternating between the kinds, so that a campaign that is stopped early covers every kind."""
    results.mkdir(parents=True, exist_ok=True)
    found = []
    for kind, share in SHARES.items():
        last = round(count * share)
        for first in range(1, last + 1, SLICE):
            found.append((kind, first, min(SLICE, last - first + 1), results / f"{kind}-{first}.json"))  # noqa: PERF401
    return sorted(found, key=lambda each: each[1])


def _apart(given: tuple[str, int, int, Path]) -> bool:
    """Run a slice in a separate process, unless it has its result already. Return whether it has a result now."""
    kind, first, count, result = given
    if not result.is_file():
        with result.with_suffix(".log").open("wb") as log:
            command = [sys.executable, "-m", "fuzzing", kind, str(first), str(count), str(result)]
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        print(f"{kind} {first} to {first + count - 1}: {'done' if result.is_file() else 'FAILED'}", flush=True)
    return result.is_file()


def _slice(kind: str, first: int, count: int, result: Path) -> int:
    from fuzzing.campaign import Tally, run

    started, shown = time.monotonic(), 0

    def note(tally: Tally) -> None:
        nonlocal shown
        for fault in tally.faults[shown:]:
            print("FAULT", fault, flush=True)
        shown = len(tally.faults)
        if tally.count % 50 == 0:
            rate = tally.count / (time.monotonic() - started)
            print(f"{kind}: {tally.count} of {count}, {rate:.1f}/s, {dict(tally.ends)}", flush=True)

    memory = Path("/dev/shm")
    work = Path(tempfile.mkdtemp(prefix="bf16kit-fuzz-", dir=memory if memory.is_dir() else None))
    try:
        tally = run(kind, range(first, first + count), work / "cases", note)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    part = result.with_suffix(".part")
    part.write_text(json.dumps(tally.__dict__, indent=1))
    part.rename(result)
    return bool(tally.faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
