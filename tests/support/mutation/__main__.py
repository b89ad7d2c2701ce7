"""Mutation score: of small faults planted one at a time in a package, which share do its tests notice?

    PYTHONPATH=tests/support python -m mutation service/batching tests/service/batching --out build/batching.json

The faults are drawn with a fixed seed. For each, the tests that execute its line run in a forked process, the fastest
first, until one fails. A fault is ``late`` if they did not end in time: it loops, or the machine is busy. Faults are
written into the files and put back: nothing else may use the tree meanwhile.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest

from mutation.faults import Fault, faults, lines, planted, rewritten

# Imported before any process is forked, which saves each a second. None may import the package under test.
_SHARED = ("numpy", "ml_dtypes", "onnx", "onnx_ir", "onnxruntime", "grpc", "google.protobuf", "prometheus_client")
_ELSEWHERE = ("long", "gpu", "compose", "models", "clients", "sources", "ray", "fuzz", "hostile", "manifests")
_QUICK = ["-m", " and ".join(f"not {mark}" for mark in _ELSEWHERE)]  # the tests of `make test`


@dataclass(eq=False)  # pytest puts plugins into a set
class Recorder:
    """A plugin of pytest: the tests that execute each line, by file (on import: the empty name), and their seconds."""

    package: Path
    out: Path
    seconds: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        where = self.package.resolve()
        self.coverage = coverage.Coverage(data_file=None, include=[str(where / "*" if where.is_dir() else where)])
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        executed = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
        passed = {name: seconds for name, seconds in self.seconds.items() if name not in self.failed}
        self.out.write_text(json.dumps({"executed": executed, "seconds": passed}), "utf-8")


def run(arguments: Sequence[str], seconds: float, recorder: Recorder | None = None) -> int | None:
    """Run pytest in a forked process; return its exit status, ``None`` if it took longer than ``seconds``."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        if recorder is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
        status = 3
        with contextlib.suppress(BaseException):
            quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            status = pytest.main([*quiet, *arguments], [recorder] if recorder else None)
        os._exit(status)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:  # what the tests started as well
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def covering(fault: Fault, line: int, record: dict[str, Any], most: float) -> list[str]:
    """Return the fastest tests that execute ``line`` of the fault's file, as many as run in ``most`` seconds.

    A line that only runs on import is every test's.
    """
    executed = record["executed"].get(str(Path(fault.file).resolve()), {})
    names = set(executed.get(str(line), ()))
    if names == {""}:
        names = {name for tests in executed.values() for name in tests}
    tests, total = [], 0.0
    for name in sorted(names & record["seconds"].keys(), key=record["seconds"].__getitem__):
        total += record["seconds"][name]
        if total > most:
            break
        tests.append(name)
    return tests


def drawn(options: argparse.Namespace) -> list[Fault]:
    """Return the sample, or those of an earlier one that did not survive; prints those that are no longer possible."""
    every = faults(options.package)
    if options.again is None:
        return random.Random(options.seed).sample(every, min(options.sample, len(every)))
    possible = {(fault.file, fault.text, fault.nth): fault for fault in every}
    found = []
    for one in json.loads(options.again.read_text("utf-8")):
        if one["outcome"] != "survived":
            fault = possible.get((one["file"], one["text"], one["nth"]))
            if fault is None:
                print(f"gone      {one['file']}:{one['line']}  {one['text']}")
            else:
                found.append(fault)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="a directory or a file")
    parser.add_argument("tests", nargs="+", help="the tests that guard it")
    parser.add_argument("--sample", type=int, default=100, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="the result of an earlier run: plant what it killed once more")
    parser.add_argument("--most", type=float, default=10.0, help="run tests that take this many seconds for a fault")
    parser.add_argument("--out", type=Path, required=True, help="the result, as JSON")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path.cwd()))
    os.environ |= {"CI": "true", "OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "false"}
    os.environ["COVERAGE_CORE"] = "ctrace"  # the one that knows which test runs
    for name in _SHARED:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files are put back
    started, covered = time.monotonic(), options.out.with_suffix(".coverage.json")
    covered.unlink(missing_ok=True)
    results, chosen = [], sorted(drawn(options), key=lambda fault: (fault.file, fault.line))
    with rewritten(options.package):
        if run([*_QUICK, *options.tests], 3600, Recorder(options.package, covered)) not in (0, 1):
            sys.exit("the tests could not be run")
        record = json.loads(covered.read_text("utf-8"))
        at = {file: lines(Path(file)) for file in {fault.file for fault in chosen}}
        for turn, fault in enumerate(chosen, 1):
            tests = covering(fault, at[fault.file][fault.place], record, options.most)
            outcome = "survived"
            if tests:
                with planted(fault, turn):
                    status = run(["-x", *tests], 15 + 4 * options.most)
                outcome = {0: "survived", None: "late"}.get(status, "killed")
            results.append(asdict(fault) | {"outcome": outcome, "tests": len(tests)})
            print(f"{outcome:9} {fault.file}:{fault.line}  {fault.text}  ({len(tests)} tests)", flush=True)
    options.out.write_text(json.dumps(results, indent=1), "utf-8")
    killed, late = (sum(result["outcome"] == one for result in results) for one in ("killed", "late"))
    took = f"{len(record['seconds'])} tests, {time.monotonic() - started:.0f} s"
    print(f"{options.package}: {killed} of {len(results)} killed, {late} late ({took})")


if __name__ == "__main__":
    main()
