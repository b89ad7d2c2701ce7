"""The fp32 reference that serves requests: loaded by the same steps as any model, in memory that processes share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp

from bf16kit.messages.errors import ArtifactError, BudgetExceeded, ConfigError
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, CachingWeightStore
from service.models.fp32 import load_fp32
from service.models.opening import OpenedArtifact, open_artifact
from service.models.policy import Serving


@pytest.fixture
def opened(tmp_path: Path) -> OpenedArtifact:
    write_mlp(tmp_path / "mlp" / "1")
    return open_artifact(tmp_path / "mlp" / "1", Serving())


@pytest.mark.parametrize("shared", [False, True])
def test_the_reference_matches_the_golden_samples_and_takes_its_weights_from_the_store(
    opened: OpenedArtifact, shared: bool
) -> None:
    store = CachingWeightStore(PRIVATE_STORE)
    runtime = load_fp32("m", opened, Serving(), threads=1, weights=store if shared else PRIVATE_STORE)
    golden = opened.artifact.golden()
    np.testing.assert_allclose(runtime.run(golden.inputs)["y"], golden.outputs["y"], rtol=1e-5, atol=1e-6)
    assert runtime.info.precision == "fp32"
    assert len(store.arrays) == shared


def test_the_reference_is_warmed_up_and_checked_before_it_serves(opened: OpenedArtifact, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warmup asks for 2 rows"):
        load_fp32("m", replace(opened, batch_axis=None), Serving(warmup=(2,)), threads=1, weights=PRIVATE_STORE)
    spoilt = write_mlp(tmp_path / "mlp" / "2", spoil=1.0).path
    with pytest.raises(BudgetExceeded):
        load_fp32("m", open_artifact(spoilt, Serving()), Serving(), threads=1, weights=PRIVATE_STORE)


def test_an_artifact_that_was_replaced_in_place_is_rejected(opened: OpenedArtifact) -> None:
    """The served weights were copied when they were loaded; the reference would be another model's."""
    with (opened.artifact.path / "weights.bf16").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(ArtifactError, match=r"weights\.bf16"):
        load_fp32("m", opened, Serving(), threads=1, weights=PRIVATE_STORE)


def test_an_artifact_without_a_reference_is_an_error(opened: OpenedArtifact) -> None:
    manifest = opened.artifact.manifest.model_copy(update={"reference": None})
    bare = replace(opened, artifact=replace(opened.artifact, manifest=manifest))
    with pytest.raises(ArtifactError, match="no fp32 reference"):
        load_fp32("m", bare, Serving(), threads=1, weights=PRIVATE_STORE)
