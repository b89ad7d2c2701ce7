"""Write ``docs/reliability-converter.md``, the page with the outcomes of a campaign."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

SEEDS = "13 ONNX, 3 safetensors, 7 torch, 3 Flax and 4 Orbax seeds"
_HEAD = """# How reliable the converter is
Written by `make fuzz`, on commit {commit}.

## Damaged sources
{total} mutants of valid ONNX, safetensors, torch, Flax and Orbax files ({seeds}). Each mutant has a
number, from which it can be made again. TorchScript and torch.export files are not among them: they are programs, read
only if they are trusted (SECURITY.md). The mutations are:

* flipped bits, files that are cut or spliced
* edits that know the format: dimensions, dtypes, external locations and offsets, names, cycles, attributes,
  opsets, nested bodies, endless loops, header lengths, duplicate keys, zip tables, pickles with forbidden globals,
  links

`bf16-convert` converts each mutant in a separate process. The test watches every file that this process opens
(audit hooks; inotify on files beside the source for native libraries). A mutant passes in one of two ways:

* It is converted and restored, and the restored tensors are the mutant's own, bit for bit, as another reader finds
  them.
* It is rejected with exit code 1, 2 or 3 and one message of at most {longest} characters. The message names a file
  or a tensor, and has no traceback, no internals of a library and not the word bug. No files are left behind.

In both cases it takes at most {seconds} s and {memory} GiB, and neither reads nor writes files elsewhere.

* **Options.** Every mutant was converted with `{options}`. The other formats, the report and the search for
  islands were not tested.
* **Time.** The {seconds} s are processor time, from the fork of a process that has imported the program to the end
  of converting, restoring and comparing. More than {patience} s of wall-clock time also fail.
  The campaign shortens the limit of the trial of an ONNX file from 600 s of processor time to a few seconds.
* **Memory.** The {memory} GiB limit the data allocated after the fork (`RLIMIT_DATA`, without mapped files), and
  the growth of the largest resident memory, with mapped files.
* **Weights files** that can be read: {share:.0%} are converted. The others are read, compared and fitted into
  their module, and stop there for want of `--input`, because exporting a module takes a second.

| kind | mutants | converted | read and fitted | exit 1 | exit 2 | exit 3 | ended otherwise |
|---|---|---|---|---|---|---|---|
"""

_TAIL = """
| kind | processor seconds, mean | slowest | largest, MiB |
|---|---|---|---|
{costs}
{faults}
Convert models of people you do not know under limits of the system (`ulimit`, a container).

## SIGKILL
`tests/fuzz/test_killed.py` kills conversions over a published artifact at 50 moments, and restores over a file at
50 more. The moments are spread over the steps of the run, and closest around publishing. Each time the old or the
new artifact is there, byte for byte. Beside it are only hidden temporary files, which the next run removes.
"""


# The mutants' directory on this machine. It is left out, so that the page does not depend on the machine.
_WORK = re.compile(rf"(?:/dev/shm|/tmp|{re.escape(tempfile.gettempdir())})/(?:[^/\s'\"]+/)*")


def commit() -> str:
    """Return the short hash of the commit that is checked out."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def of(tallies: Sequence[dict[str, Any]], of_commit: str) -> str:
    """Return the page for the tallies of all slices, which ran on one commit."""
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
    text = f"{found} faults:\n\n" + "".join(f"* {fault[:200]}\n" for fault in faults[:20]) if faults else "No faults.\n"
    return head + rows + _TAIL.format(costs=costs.rstrip(), faults=f"\n{text}")
