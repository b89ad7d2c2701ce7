"""Converts the catalogue as a user would, and records the results."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from catalogue import Entry

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = Path(os.environ.get("BF16KIT_MODELS", ROOT / "build" / "models"))
# Where tests/environments/models.txt is installed: only these tests and their conversions use it.
SITE = ROOT / "build" / "environments" / "models" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
MEASURED = BUILD / "measured.md"
LONGEST = 900.0  # seconds of one conversion: its search may take 300, and more to finish a step on a busy machine


@dataclass(frozen=True, slots=True)
class Conversion:
    """One run of ``bf16-convert`` with every option at its default."""

    entry: Entry
    target: Path
    code: int
    said: str
    seconds: float

    @property
    def artifact(self) -> Artifact:
        return Artifact.open(self.target)


Convert = Callable[[Entry], Conversion]


def convert(entry: Entry, repository: Path) -> Conversion:
    """Convert ``entry`` into ``repository``; its samples come from ``real_inputs``."""
    target = repository / entry.name / "1"
    path = (os.environ.get("PYTHONPATH", ""), str(HERE), str(SITE))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [str(Path(sys.executable).with_name("bf16-convert")), "checkpoint", str(entry.path(BUILD))]
    command += ["--out", str(target), "--samples", f"real_inputs:{entry.samples}", "--force"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LONGEST)
    return Conversion(entry, target, done.returncode, done.stdout + done.stderr, time.monotonic() - started)


def line(conversion: Conversion) -> str:
    """Return the line of docs/models.md's table for what ``conversion`` published.

    Drift is the worst output's relative_l2, as judged against the budget; "–" if all outputs are one number per sample.
    The slice error is the largest of both profiles.
    """
    entry, manifest = conversion.entry, conversion.artifact.manifest
    weights, residual = (
        sum(file.bytes for name, file in manifest.files.items() if name.startswith(part))
        for part in ("weights.", "residual.bin")
    )
    source, islands = manifest.source.bytes, _islands(manifest)
    drifts = [_judged(manifest, profile, "relative_l2", "mean") for profile in ("cpu", "cuda")]
    cells = (
        entry.name,
        entry.kind,
        f"{entry.source} {entry.version}",
        entry.licence,
        f"{source / 1e6:.2f}",
        f"{weights / source:.3f} ×",
        f"{(weights + residual) / source:.3f} ×",
        *(f"{drift:.2g}" if drift else "–" for drift in drifts),
        f"{max(_judged(manifest, profile, 'slice_error', 'worst') for profile in ('cpu', 'cuda')):.2g}",
        f"{len(islands)} of {len(manifest.plan.nodes['cuda'])}" if islands else "–",
        f"{conversion.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |\n"


def _judged(manifest: Manifest, profile: str, metric: str, statistic: str) -> float:
    outputs = manifest.drift[profile].outputs.values()
    return max((output[metric][statistic] for output in outputs if metric in output), default=0.0)


def _islands(manifest: Manifest) -> set[str]:
    """Return the nodes and tensors that the search kept in fp32, in any profile."""
    entries = [*manifest.plan.tensors, *(entry for nodes in manifest.plan.nodes.values() for entry in nodes)]
    return {entry.name for entry in entries if entry.code == "budget"}
