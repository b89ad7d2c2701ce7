"""An opened artifact: whether a container has room for it, and what its live responses are compared with."""

import logging
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp, write_product
from containers import in_container
from numpy.typing import NDArray

from bf16kit.artifact.entries import DriftEntry
from bf16kit.artifact.manifest import MANIFEST, MEASUREMENTS
from bf16kit.artifact.publish import staging
from bf16kit.drift.measurements import InputRange, Measurements, ProfileMeasurements, SampleColumns
from bf16kit.drift.metrics import SampleDrift
from bf16kit.messages.errors import ConfigError, RuntimeFailure
from bf16kit.runtime.memory.weightstore import Fill, PrivateWeightStore
from bf16kit.runtime.ort import kernel
from bf16kit.service.drift.sampler import Sample
from bf16kit.service.models import loading
from bf16kit.service.models.opened import OpenedArtifact, new_comparison, open_artifact
from bf16kit.service.models.serving import Serving
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.system.controlgroup import RESERVE


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "m" / "1"
    write_mlp(path)
    return path


@pytest.mark.parametrize("missing", [0, 1])
def test_a_model_that_does_not_fit_is_rejected_and_the_log_has_the_sizes_of_one_that_does(
    tmp_path: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: int
) -> None:
    """The line is the last one of the log if the load ends the container."""
    caplog.set_level(logging.INFO)
    left = RESERVE + open_artifact(artifact, Serving()).weight_bytes - missing
    in_container(monkeypatch, tmp_path, limit=100_000_000, left=left)
    room = "67 MB are left of the 100 MB that this container may take"
    expected = pytest.raises(ConfigError, match=f"^it needs 67 MB of memory at least, and {room}; raise")
    with expected if missing else nullcontext():
        loading.load(artifact, Serving(), device="cpu", threads=1).close()
    assert (f"{artifact}: 0 MB of weights are loaded now; {room}" in caplog.messages) is not bool(missing)


class Full(PrivateWeightStore):
    """A store of weights without room: another process may have taken it since the load began."""

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        raise MemoryError("no room for 45 MB of weights")


@pytest.mark.skipif(not kernel.configured_kernel().path, reason="only the CPU kernel reads weights as stored")
def test_a_lack_of_memory_during_a_load_is_a_runtime_failure(tmp_path: Path) -> None:
    write_product(tmp_path / "m" / "1")
    with pytest.raises(RuntimeFailure, match=r"profile cpu cannot be loaded: no room for 45 MB of weights"):
        loading.load(tmp_path / "m" / "1", Serving(profile="cpu"), device="cpu", threads=1, weights=Full())


def measured_artifact(tmp_path: Path, data: bytes) -> OpenedArtifact:
    """Return an artifact whose measurements file contains ``data``."""
    plain = write_mlp(tmp_path / "plain" / "1")
    with staging(tmp_path / "m" / "1") as stage:
        for file in plain.path.iterdir():
            if file.name != MANIFEST:
                shutil.copy(file, stage.path / file.name)
        (stage.path / MEASUREMENTS).write_bytes(data)
        drift = {"cpu": DriftEntry(samples=50, source="some.npz", outputs={})}
        stage.publish(plain.manifest.amended(measurements=MEASUREMENTS, drift=drift))
    return open_artifact(tmp_path / "m" / "1", Serving())


def score(opened: OpenedArtifact) -> float | None:
    """Return the detector's score after one row with a hundred times the measured drift; None if it has none.

    A second row is out of range, which does not count in the score.
    """
    comparison, metrics = new_comparison("m", 3, opened), Metrics()
    series = metrics.add("m", 3)
    series.opened(0, opened.outputs)
    width = opened.inputs[0].shape[1]
    assert isinstance(width, int)
    (spec,) = opened.outputs
    expected = np.ones((1, *(dim for dim in spec.shape[1:] if isinstance(dim, int))), np.float32)
    for x in (0.5, 1e9):
        sample = Sample({"x": np.full((1, width), x, np.float32)}, {spec.name: expected * 1.1}, 1, 9, 0.5, "", "cpu")
        comparison.observe({spec.name: expected}, sample, series)
    assert (comparison.verdict().model, comparison.verdict().version) == ("m", 3)
    text = metrics.expose()[0].decode()
    assert ('bf16kit_drift_out_of_range_total{input="x",model="m",version="3"} 1.0' in text) == (MEASURED in text)
    lines = [line for line in text.splitlines() if line.startswith("bf16kit_drift_change_score{")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else None


MEASURED = "bf16kit_drift_change_score{"


def test_a_row_is_compared_with_the_artifacts_measurements_of_its_profile(tmp_path: Path) -> None:
    (name,) = (spec.name for spec in write_mlp(tmp_path / "other" / "1").manifest.outputs)
    columns = SampleColumns.of([SampleDrift(1e-3, 0, 0, 60, 0, 0, 0)] * 50, 50)
    told = Measurements(
        profiles={"cpu": ProfileMeasurements(outputs={name: columns})}, inputs={"x": InputRange(low=0.0, high=1.0)}
    )
    assert score(measured_artifact(tmp_path, told.dumps())) == pytest.approx(0.1)


def test_measurements_that_cannot_be_read_are_logged_and_stop_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert score(measured_artifact(tmp_path, b'{"version": 99}')) is None
    assert "model 'm' version 3: the measurements cannot be read" in caplog.text
    assert "the spread of drift is learned from the first 200 live rows in budget" in caplog.text
