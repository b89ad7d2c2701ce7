"""The fuzzer's own guards: forbidden actions of a mutant are detected."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each case forks, which a process with threads must not do: therefore each runs in a separate process.
_RUN = """
import ctypes, os, sys, time
from pathlib import Path
from fuzzing import confined
from fuzzing.canary import Canary

confined.SECONDS, confined.PATIENCE = 1, 1 if sys.argv[2] == "sleep" else 6
work = Path(sys.argv[1])
canary = Canary(work)
DEEDS = {
    "nothing": lambda: None,
    "read outside": lambda: bool(Path("/etc/hostname").read_bytes()),
    "write outside": lambda: (work / "made").write_bytes(b""),
    "list outside": lambda: os.listdir("/etc"),
    "remove outside": lambda: (work / "nothing").unlink(missing_ok=True),
    "start a program": lambda: os.system("true"),
    "open natively": lambda: ctypes.CDLL(None).open(os.fsencode(canary.path), 0),
    "crash": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "take memory": lambda: bytearray(3 << 30),
    "compute": lambda: any(False for _ in iter(int, 1)),
    "sleep": lambda: time.sleep(60),
    "raise": lambda: 1 / 0,
}
with confined.directory(work, "case") as inside:
    end = confined.call(lambda judging: DEEDS[sys.argv[2]](), inside)
print(end.result, end.signal, list(end.outside) + canary.disturbed("case"), end.late)
"""


def _end(tmp_path: Path, deed: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path), deed],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.parametrize(
    ("deed", "seen"),
    [
        ("nothing", "None 0 [] False"),
        ("read outside", "open read /etc/hostname"),
        ("write outside", "open write {here}/made"),
        ("list outside", "os.listdir read /etc"),
        ("remove outside", "os.remove write {here}/nothing"),
        ("start a program", "os.system"),
        ("open natively", "canary secret: event 0x20"),
        ("crash", "None 11 [] False"),
        ("exit", "None 6 [] False"),
        ("take memory", "'escaped': 'MemoryError"),
        ("compute", "[] True"),
        ("sleep", "None 9 [] True"),
        ("raise", "'escaped': 'ZeroDivisionError"),
    ],
)
def test_forbidden_actions_of_a_mutant_are_detected(tmp_path: Path, deed: str, seen: str) -> None:
    assert seen.format(here=tmp_path.resolve()) in _end(tmp_path, deed)
