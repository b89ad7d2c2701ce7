"""``python -m fuzzing KIND FIRST COUNT``: a slice of a campaign; faults as they come, the tally as JSON at the end."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from fuzzing.campaign import Tally, run


def main(arguments: list[str]) -> int:
    kind, first, count, result = arguments[0], int(arguments[1]), int(arguments[2]), Path(arguments[3])
    started, shown = time.monotonic(), 0

    def note(tally: Tally) -> None:
        nonlocal shown
        for fault in tally.faults[shown:]:
            print("FAULT", fault, flush=True)
        shown = len(tally.faults)
        if tally.count % 100 == 0:
            rate = tally.count / (time.monotonic() - started)
            print(f"{kind}: {tally.count} of {count}, {rate:.1f}/s, {dict(tally.ends)}", flush=True)

    home = "/dev/shm" if Path("/dev/shm").is_dir() else None
    work = Path(tempfile.mkdtemp(prefix="bf16kit-fuzz-", dir=home))
    try:
        tally = run(kind, range(first, first + count), work / "cases", note)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result.write_text(json.dumps(tally.__dict__, indent=1))
    return bool(tally.faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
