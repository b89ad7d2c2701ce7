"""Converts the catalogue as a user would, and records the results."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from catalogue import Entry

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = Path(os.environ.get("BF16KIT_MODELS", ROOT / "build" / "models"))
# Where tests/environments/models.txt is installed: only these tests and their conversions use it.
SITE = ROOT / "build" / "environments" / "models" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
MEASURED = BUILD / "measured.json"
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


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table in docs/models.md.

    Drift is the worst output's relative_l2, as judged against the budget; 0 if all outputs are one number per sample.
    ``worst_slice`` is the largest slice error of both profiles.
    """

    name: str
    kind: str
    package: str
    licence: str
    source_bytes: int
    bf16_ratio: float
    with_residual: float
    cpu: float
    cuda: float
    worst_slice: float
    islands: int
    nodes: int
    seconds: float


def row(conversion: Conversion) -> Row:
    """Return the figures of what ``conversion`` published."""
    entry, manifest = conversion.entry, conversion.artifact.manifest
    weights = sum(manifest.files[name].bytes for name in manifest.files if name.startswith("weights."))
    residual = sum(manifest.files[name].bytes for name in manifest.files if name == "residual.bin")
    return Row(
        name=entry.name,
        kind=entry.kind,
        package=f"{entry.source} {entry.version}",
        licence=entry.licence,
        source_bytes=manifest.source.bytes,
        bf16_ratio=weights / manifest.source.bytes,
        with_residual=(weights + residual) / manifest.source.bytes,
        cpu=_judged(manifest, "cpu", "relative_l2", "mean"),
        cuda=_judged(manifest, "cuda", "relative_l2", "mean"),
        worst_slice=max(_judged(manifest, profile, "slice_error", "worst") for profile in ("cpu", "cuda")),
        islands=len(_islands(manifest)),
        nodes=len(manifest.plan.nodes["cuda"]),
        seconds=conversion.seconds,
    )


def _judged(manifest: Manifest, profile: str, metric: str, statistic: str) -> float:
    outputs = manifest.drift[profile].outputs.values()
    return max((output[metric][statistic] for output in outputs if metric in output), default=0.0)


def _islands(manifest: Manifest) -> set[str]:
    """Return the nodes and tensors that the search kept in fp32, in any profile."""
    entries = [*manifest.plan.tensors, *(entry for nodes in manifest.plan.nodes.values() for entry in nodes)]
    return {entry.name for entry in entries if entry.code == "budget"}


def record(rows: list[Row]) -> None:
    """Store ``rows`` for :mod:`table`."""
    MEASURED.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", "utf-8")


def recorded() -> list[Row]:
    """Return the rows that the last run stored."""
    return [Row(**fields) for fields in json.loads(MEASURED.read_text("utf-8"))]
