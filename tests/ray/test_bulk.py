"""Convert many checkpoints on the nodes of a cluster: the output and files of a run, and a node that dies."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from raycluster import NODE, PATIENCE
from waiting import until

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.converter.bulk.conversions import RECORDS

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # warnings of Ray and its libraries
_QUICK = ("--format", "onnx", "--profile", "cpu", "--no-report")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    directory = tmp_path / "models"
    directory.mkdir()
    for name, width in (("a", 24), ("b", 32), ("c", 40)):
        onnx.save(graphs.mlp((8, width, 8)), directory / f"{name}.onnx")
    return directory


def _started(models: Path, out: Path, address: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bf16kit.converter.cli", "checkpoint", str(models), "--out", str(out), *_QUICK]
    return subprocess.Popen(
        [*command, "--ray", address, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _targets(out: Path) -> set[str]:
    """Return the artifacts that processes of this machine, where all nodes are, write at the moment."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found |= {word for word in process.read_text().split("\0") if word.startswith(f"{out}/")}
    return found


def test_the_conversion_of_a_dead_node_is_repeated_and_a_second_run_finds_all_done(
    cluster: Any, models: Path, tmp_path: Path
) -> None:
    """Two nodes run a conversion each; the conversion that the killed node had begun is started again."""
    (models / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0")
    out = tmp_path / "repository"
    running = _started(models, out, cluster.address)
    until(lambda: len(_targets(out)) >= 2, PATIENCE, "a conversion on each node")
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    cluster.add_node(**NODE)
    told, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 2, said  # because of the file in an unsupported format
    assert "3 of 4 checkpoints converted" in told
    assert "the process or node that converted it died" in said
    assert "attempt 1 of 3" in said
    for name in "abc":
        assert set(Artifact.open(out / name / "1").manifest.profiles) == {"cpu"}
    assert sorted(path.name for path in (out / RECORDS).glob("*.sha256")) == ["a.sha256", "b.sha256", "c.sha256"]
    again = _started(models, out, cluster.address)
    _, said = again.communicate(timeout=PATIENCE)
    assert again.returncode == 2, said
    assert said.count("done before") == 3


def test_an_unreachable_cluster_gives_a_clear_message(models: Path, tmp_path: Path) -> None:
    running = _started(models, tmp_path / "repository", "127.0.0.1:1")
    _, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 2
    assert "cannot connect to a Ray cluster" in said
    assert "Traceback" not in said
