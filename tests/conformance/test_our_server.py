"""``bf16-serve`` breaks no rule of the conformance suite."""

import json
import subprocess
import sys
from pathlib import Path

from serverprocess import ServerProcess

SUITE = Path(sys.executable).with_name("oip-conformance")  # a package of its own, in conformance/


def tried(*arguments: str) -> dict[str, dict[str, str]]:
    """Return the result of each check; fail the test, with the full result, if the server breaks a rule."""
    command = [str(SUITE), *arguments, "--json", "--assume", "sequence"]  # streams belong to it; sequences are rejected
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert not ran.stderr
    checks = json.loads(ran.stdout)["checks"]
    assert not [check for check in checks if check["outcome"] == "FAIL"]
    assert ran.returncode == 0
    return {check["id"]: check for check in checks}


def skipped(checks: dict[str, dict[str, str]], *groups: str) -> list[str]:
    """Return the skipped checks of these groups, with the reasons."""
    return [
        f"{id}: {check['why']}"
        for id, check in checks.items()
        if id.startswith(groups) and check["outcome"] == "skip" and "/" not in id
    ]


def test_the_server_with_default_settings_conforms(served: ServerProcess) -> None:
    checks = tried(served.target)
    tested = ("server.", "model.", "config.", "datatype.", "request.", "parameters.", "stream.", "statistics.", "call.")
    assert not skipped(checks, *tested, "classification.", "health.", "reflection.", "infer.answered", "infer.batch")


def test_the_server_with_every_feature_on_conforms(opened: ServerProcess) -> None:
    checks = tried(opened.target, "--control", "words", "--region-prefix", "bf16kit_", "--dangerous")
    assert not skipped(checks, "memory.register", "memory.input", "memory.output", "memory.unregister")
    assert not skipped(checks, "trace.", "log.", "index.", "control.", "danger.")
