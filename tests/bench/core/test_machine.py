"""The key under which a machine's results are stored, and whether checkout and machine are fit for results."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.core import machine

ROOT = Path(__file__).parents[3]
AUTHOR = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]


def test_a_checkout_is_clean_unless_its_code_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New results and documents leave it clean: another benchmark may have written them."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert not machine.clean()  # not a checkout
    (tmp_path / "measured.py").write_text("1")
    for command in (["init", "-q"], ["add", "-A"], [*AUTHOR, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    for name in ("bench/results/one.json", "README.md"):
        (tmp_path / name).write_text("{}")
    assert machine.clean()
    before = machine.describe()
    assert machine.unchanged(before)
    for name in ("measured.py", "untracked.py"):
        (tmp_path / name).write_text("2")
        assert not machine.clean()
        assert not machine.unchanged(before)
        subprocess.run(["git", *AUTHOR, "stash", "-qu"], cwd=tmp_path, check=True)
    subprocess.run(["git", *AUTHOR, "commit", "-q", "--allow-empty", "-m", "two"], cwd=tmp_path, check=True)
    assert machine.clean()
    assert not machine.unchanged(before)


def test_the_share_of_other_programs_excludes_our_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors in ten seconds: twelve seconds are busy, four of these are ours, and one second is stolen."""
    ticks, own, now = iter([(100.0, 5.0), (112.0, 6.0)]), iter([1.0, 5.0]), iter([0.0, 10.0])
    monkeypatch.setattr(machine, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(machine, "own_seconds", lambda: next(own))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert machine.OtherProgramsTime().shares() == {"other_programs": 0.4, "stolen": 0.05}


@pytest.mark.long
def test_time_of_children_whose_parent_did_not_wait_is_our_own() -> None:
    """A child starts a grandchild that computes for half a second, and ends before it."""
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spin!r}])"
    script = f"""
import subprocess, sys, time
from bench.core import machine
machine.adopt_orphans()
subprocess.run([sys.executable, "-c", {leave!r}], check=True)
deadline = time.monotonic() + 60
while machine.own_seconds() < 0.5 and time.monotonic() < deadline:
    time.sleep(0.05)
print(machine.own_seconds())
"""
    used = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert float(used) > 0.5
