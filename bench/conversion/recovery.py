"""What a recovery gives back, on nets trained on scikit-learn's digits: drift and labelled accuracy before and after.

``python -m bench.conversion.recovery`` writes the table of docs/recovering.md from the results. What is measured is
accuracy, not time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.conversion import digits
from bench.core import models, results
from bench.core.results import Measurement, Result
from bench.core.workspace import Workspace
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import RecoveryEntry
from bf16kit.runtime import Runtime
from bf16kit.runtime.loading import load_reference
from converter.verify.running import open_profile

_PAGE = models.ROOT / "docs" / "recovering.md"
_BEGIN, _END = "<!-- recovery: written by python -m bench.conversion.recovery -->\n", "<!-- end of recovery -->\n"
_BUDGET = 1.5e-2


@dataclass(frozen=True, slots=True)
class Case:
    """A net that reads ``offset`` counts under its signal, recovered in ``precision`` for what ``profile`` runs."""

    net: str
    offset: int
    precision: str
    profile: str
    promised: bool = False

    @property
    def name(self) -> str:
        return f"{self.net}, offset {self.offset}, {self.precision}, {self.profile}"


CASES = (
    Case("cnn", 1024, "32-true", "cpu", promised=True),
    Case("transformer", 1024, "32-true", "cpu", promised=True),
    Case("cnn", 1024, "bf16-mixed", "cuda"),
    Case("transformer", 1024, "bf16-mixed", "cuda"),
    Case("cnn", 64, "32-true", "cpu", promised=True),
    Case("transformer", 64, "32-true", "cpu", promised=True),
)
STEPS = 200


def measure(workspace: Workspace, *, quick: bool) -> Result:
    """Each case before and after; the drift of those that are promised must come back within the default budget."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    measurements: list[Measurement] = []
    for case in CASES[:1] if quick else CASES:
        measurements += _measured(case, *_recovered(case, workspace, 10 if quick else STEPS))
    return Result(
        "recovery",
        measurements,
        settings={"steps": STEPS, "images": "1,200 to train on, 597 held out", "learning rate": 1e-3, "seed": 0},
        notes=(
            "relative_l2 is from what the original weights answer in fp32 to the images held out, before and after",
            "of biases alone: the root of the mean square over the 8 batches of training data that choose the weights",
            "cuda is emulated on the CPU",
        ),
    )


def _recovered(case: Case, workspace: Workspace, steps: int) -> tuple[RecoveryEntry, dict[str, float]]:
    """What the recovery measured, and the share of right answers in fp32, in bf16, and in bf16 once recovered."""
    environment = os.environ | {"PYTHONPATH": str(models.ROOT), "BF16KIT_DIGITS_OFFSET": str(case.offset)}
    environment["OMP_NUM_THREADS"] = "1"  # sums in one order, and no threads that wait for each other in small nets
    source = workspace.root / f"{case.net}-{case.offset}.pt"
    if not source.exists():
        _run([sys.executable, "-m", "bench.conversion.digits", case.net, str(source)], environment)
    shared = [str(source), "--model", f"bench.conversion.digits:{case.net.title()}", "--input"]
    shared += ["image:float32:batch,1,8,8", "--format", "onnx", "--profile", case.profile, "--allow-over-budget"]
    training = ["--data", "bench.conversion.digits:shuffled", "--eval", "bench.conversion.digits:held_out"]
    training += ["--steps", str(steps), "--precision", case.precision, "--device", "cpu"]
    artifacts = []
    for command, flags in (("checkpoint", ["--no-search"]), ("recover", training)):
        target = workspace.root / "artifacts" / f"{command}-{case.name}".replace(", ", "-").replace(" ", "-") / "1"
        if not target.exists():
            converter = [sys.executable, "-m", "converter.cli", command, *shared, *flags, "--no-report"]
            _run([*converter, "--out", str(target)], environment)
        artifacts.append(Artifact.open(target))
    digits.OFFSET = float(case.offset)
    right = {"fp32": _right(load_reference(artifacts[0]))}
    right |= {"bf16": _right(open_profile(artifacts[0], case.profile)[0])}
    right |= {"recovered": _right(open_profile(artifacts[1], case.profile)[0])}
    measured = artifacts[1].measurements()
    assert measured is not None
    assert measured.recovery is not None
    return measured.recovery, right


def _right(runtime: Runtime) -> float:
    """The share of the images held out to which ``runtime`` gives the right answer."""
    found = [runtime.run(feeds)["logits"].argmax(-1) == labels for feeds, labels in digits.held_out()]
    runtime.close()
    return float(np.concatenate(found).mean())


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[1:4]} failed with exit code {done.returncode}:\n{done.stderr}")


def _measured(case: Case, entry: RecoveryEntry, right: Mapping[str, float]) -> Iterator[Measurement]:
    drift = next(r for r in entry.drift if r.profile == case.profile and r.metric == "relative_l2")
    assert drift.before is not None
    for what, share in right.items():
        yield Measurement(f"{case.name}: accuracy, {what}", share)
    yield Measurement(f"{case.name}: relative_l2, bf16", drift.before)
    yield Measurement(f"{case.name}: relative_l2, biases alone", entry.training.looks[0].loss ** 0.5)
    goal = _BUDGET if case.promised else None
    yield Measurement(f"{case.name}: relative_l2, recovered", drift.after, at_most=goal)


def table(found: dict[str, float]) -> str:
    """The rows of docs/recovering.md of measured values by name."""
    lines = [
        "| net | offset | trained in | profile | accuracy fp32 | bf16 | recovered | relative_l2 bf16 | biases alone"
        " | recovered |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        right = [f"{found[f'{case.name}: accuracy, {what}']:.3f}" for what in ("fp32", "bf16", "recovered")]
        drift = [f"{found[f'{case.name}: relative_l2, {what}']:.3g}" for what in ("bf16", "biases alone", "recovered")]
        cells = (case.net, str(case.offset), case.precision, case.profile, *right, *drift)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table of docs/recovering.md from the results of this kind of machine, or of the directory given."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    directory = Path(given[0]) if given else results.here()
    content = json.loads((directory / "recovery.json").read_text("utf-8"))
    found = {row["name"]: row["value"] for row in content["measurements"]}
    text = _PAGE.read_text("utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin, f"{_PAGE} has no mark"
    assert end, f"{_PAGE} has no end mark"
    _PAGE.write_text(
        before + begin + table(found) + f"\n`{content['command']}`, {content['machine']['date']}.\n" + end + after,
        "utf-8",
    )
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
