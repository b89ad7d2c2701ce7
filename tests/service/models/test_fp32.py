"""The fp32 reference as what answers: loaded by the steps of any model, in the memory that processes share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifacts import write_mlp

from bf16kit.errors import ArtifactError, BudgetExceeded, ConfigError
from bf16kit.runtime.weightstore import OWN, Remembering
from service.models.fp32 import load_fp32
from service.models.opening import Opened, open_artifact
from service.models.policy import Serving


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    write_mlp(tmp_path / "mlp" / "1")
    return open_artifact(tmp_path / "mlp" / "1", Serving())


@pytest.mark.parametrize("shared", [False, True])
def test_it_answers_as_the_golden_samples_say_and_shares_its_weights_where_others_do(
    opened: Opened, shared: bool
) -> None:
    store = Remembering(OWN)
    runtime = load_fp32("m", opened, Serving(), threads=1, weights=store if shared else OWN)
    golden = opened.artifact.golden()
    np.testing.assert_allclose(runtime.run(golden.inputs)["y"], golden.outputs["y"], rtol=1e-5, atol=1e-6)
    assert runtime.info.precision == "fp32"
    assert len(store.given) == shared


def test_it_is_warm_and_judged_before_it_may_answer(opened: Opened, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warmup asks for 2 rows"):
        load_fp32("m", replace(opened, batch_axis=None), Serving(warmup=(2,)), threads=1, weights=OWN)
    spoilt = write_mlp(tmp_path / "mlp" / "2", spoil=1.0).path
    with pytest.raises(BudgetExceeded):
        load_fp32("m", open_artifact(spoilt, Serving()), Serving(), threads=1, weights=OWN)


def test_an_artifact_that_was_replaced_in_place_is_refused(opened: Opened) -> None:
    """What serves was copied when it was loaded; its reference would be another model's."""
    with (opened.artifact.path / "weights.bf16").open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(ArtifactError, match=r"weights\.bf16"):
        load_fp32("m", opened, Serving(), threads=1, weights=OWN)


def test_an_artifact_without_a_reference_says_so(opened: Opened) -> None:
    manifest = opened.artifact.manifest.model_copy(update={"reference": None})
    bare = replace(opened, artifact=replace(opened.artifact, manifest=manifest))
    with pytest.raises(ArtifactError, match="no fp32 reference"):
        load_fp32("m", bare, Serving(), threads=1, weights=OWN)
