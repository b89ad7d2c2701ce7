"""``docs/reliability-converter.md``: how the mutants of a campaign ended."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

SEEDS = "13 ONNX, 3 safetensors, 7 torch, 5 TorchScript, 3 torch.export, 3 Flax and 4 Orbax seeds"
_HEAD = """# How reliable the converter is
Written by `make fuzz`, on commit {commit}.

## Damaged sources
{total} mutants of valid ONNX, safetensors, torch, TorchScript, torch.export, Flax and Orbax files ({seeds}), made by
number, so that each can be made again: bits flipped, files cut and spliced, and edits that know the format:
dimensions, dtypes, external locations and offsets, names, cycles, attributes, opsets, bodies in bodies, loops without
end, header lengths, duplicate keys, zip tables, pickles with forbidden globals, operators and code where torch's
loader would run them, links. Each is converted by `bf16-convert` in a process of its own, of which every file that it
opens is watched (audit hooks; inotify on files beside the source for what native libraries do). It ends well when

* it is converted, restored, and the tensors given back are the mutant's own, as another reader finds them, bit for bit;
* or it is refused with exit code 1, 2 or 3 and one message of at most {longest} characters that names a file or a
  tensor, without a traceback, a library's inside or the word bug, and nothing is left behind.

In either case it takes at most {seconds} s and {memory} GiB, and neither reads nor writes outside. Every mutant was
converted with `{options}`: the other formats, the report and the search
for islands were not under attack, and no commit but the one above. The {seconds} s are of processor time (more than
{patience} s by the clock are too many as well), from the fork of a process that has imported the program to its end:
converting, restoring, comparing. The {memory} GiB limit the data that it allocates beyond what it had at the fork
(`RLIMIT_DATA`: mapped files do not count), and what its largest resident memory, mapped files included, is beyond
its parent's. Of the weights files that can be read {share:.0%} are converted; the others are read, compared and
fitted into their module, and end there, for want of `--input`: exporting a module takes a second.

| kind | mutants | converted | read and fitted | exit 1 | exit 2 | exit 3 | ended otherwise |
|---|---|---|---|---|---|---|---|
"""

_TAIL = """
| kind | processor seconds, mean | slowest | largest, MiB |
|---|---|---|---|
{costs}
{faults}
What is not damage is not bounded by the converter: a sound model that asks for much memory, or whose loops turn on and
on by what they compute, gets it. Run strangers' models under limits of the system (`ulimit`, a container).

## SIGKILL
`tests/fuzz/test_killed.py` kills conversions over a published artifact at 50 moments, and restores over a file at 50
more, spread over the steps of the run and closest around publishing. Each time what is there is, byte for byte, the old
one or the new one; beside it are only hidden temporary files, which the next run removes.
"""


# Where the mutants lay, which is this machine's affair: the page is the same wherever it is written.
_WORK = re.compile(rf"(?:/dev/shm|/tmp|{re.escape(tempfile.gettempdir())})/(?:[^/\s'\"]+/)*")


def commit() -> str:
    """The commit that is checked out, shortened."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def of(tallies: Sequence[dict[str, Any]], of_commit: str) -> str:
    """The page for the tallies of all slices, which ran on the code of ``of_commit``."""
    from fuzzing import campaign, confined, judge

    kinds = sorted({tally["kind"] for tally in tallies})
    total = sum(tally["count"] for tally in tallies)
    faults = [_WORK.sub("", fault) for tally in tallies for fault in tally["faults"]]
    found = len(faults)
    head = _HEAD.format(
        commit=of_commit,
        total=f"{total:,}",
        seeds=SEEDS,
        longest=judge.LONGEST,
        seconds=confined.SECONDS,
        memory=confined.MEMORY >> 30,
        patience=confined.PATIENCE,
        options=" ".join(campaign.COMMON),
        share=campaign.CONVERTED_SHARE,
    )
    rows, costs = "", ""
    for kind in kinds:
        own = [tally for tally in tallies if tally["kind"] == kind]
        ends = sum((Counter(tally["ends"]) for tally in own), Counter[str]())
        count = ends.total()
        known = ["converted", "read and fitted", "refused (1)", "refused (2)", "refused (3)"]
        cells = [count, *(ends[end] for end in known), count - sum(ends[end] for end in known)]
        rows += f"| {kind} | {' | '.join(f'{cell:,}' for cell in cells)} |\n"
        seconds = sum(sum(tally["seconds"].values()) for tally in own) / max(count, 1)
        slowest, largest = max(tally["slowest"] for tally in own), max(tally["largest"] for tally in own)
        costs += f"| {kind} | {seconds:.2f} | {slowest[0]:.1f}: {slowest[1]} | {largest[0] >> 20}: {largest[1]} |\n"
    said = f"{found} faults:\n\n" + "".join(f"* {fault[:200]}\n" for fault in faults[:20]) if faults else "No faults.\n"
    return head + rows + _TAIL.format(costs=costs.rstrip(), faults=f"\n{said}")
