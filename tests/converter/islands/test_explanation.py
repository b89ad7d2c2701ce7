"""``bf16-convert explain`` on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import onnx
import pytest
import troubled
from converting import ONNX_ONLY, Cli

from bf16kit.artifact.artifact import Artifact
from bf16kit.drift.measurements import DiagnosisEntry, LayerEntry
from converter.islands import explanation, remedy


def test_a_sound_artifact_is_on_the_expected_line(cli: Cli, small: Artifact) -> None:
    said = cli("explain", small.path).published().out
    assert "Profile cpu: SQNR of" in said
    assert "Profile cuda: SQNR of" in said
    assert said.count("Every output has the SQNR expected of rounding to bf16") == 3


def test_the_text_ends_with_the_option_to_pass(cli: Cli, target: Path, tmp_path: Path) -> None:
    onnx.save(troubled.cancellation(), tmp_path / "m.onnx")
    arguments = (tmp_path / "m.onnx", "--out", target, *ONNX_ONLY, "--allow-over-budget", "--no-search")
    cli("checkpoint", *arguments).published()
    said = cli("explain", target, "--profile", "cpu").published().out
    assert "SQNR falls below the expected line at difference (Sub)" in said
    assert "Keeping left and right in fp32 would raise output y from" in said
    assert "below the line" in said
    assert said.rstrip().endswith("--keep-fp32 '^(left|right)$'")


def _diagnosis(target: Path, profile: str = "cpu") -> DiagnosisEntry:
    measurements = Artifact.open(target).measurements()
    assert measurements is not None
    layers = measurements.profiles[profile].layers
    assert layers is not None
    assert layers.diagnosis is not None
    return layers.diagnosis


def test_the_report_of_a_model_published_over_budget_has_what_explain_says(
    cli: Cli, target: Path, tmp_path: Path
) -> None:
    onnx.save(troubled.cancellation(), tmp_path / "m.onnx")
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, "--allow-over-budget").published()
    found = _diagnosis(target)
    assert found.leaves is not None
    assert found.remedy is not None
    assert (found.leaves.name, found.remedy.keep_fp32, found.tried) == ("difference", "^(left|right)$", True)
    page = unescape((target / "report.html").read_text("utf-8"))
    said = cli("explain", target, "--profile", "cpu").published().out
    for text in ("SQNR falls below the expected line at difference (Sub)", "--keep-fp32 '^(left|right)$'"):
        assert text in said
        assert text in page
    inspected = " ".join(cli("inspect", target).published().out.split())
    assert "layers cpu: SQNR falls below the expected line at difference (Sub)" in inspected
    assert "--keep-fp32 '^(left|right)$'" in inspected


@pytest.mark.parametrize("flags", [("--no-search",), ("--search-minutes", "1e-9")])
def test_no_remedy_is_searched_if_the_search_is_off_or_has_no_time(
    cli: Cli, target: Path, tmp_path: Path, flags: Sequence[str]
) -> None:
    onnx.save(troubled.cancellation(), tmp_path / "m.onnx")
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, "--allow-over-budget", *flags).published()
    found = _diagnosis(target)
    assert found.leaves is not None
    assert (found.leaves.name, found.remedy, found.tried) == ("difference", None, False)
    assert "No remedy was looked for; bf16-convert explain looks for one." in (target / "report.html").read_text(
        "utf-8"
    )


def test_a_model_within_budget_is_diagnosed_without_another_run(
    cli: Cli, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of the conversion already show the layer that falls below the line; a remedy would take many more."""

    def tried(*_: object) -> None:
        raise AssertionError("a remedy was looked for")

    monkeypatch.setattr(remedy, "RemedyTrials", tried)
    onnx.save(troubled.cancellation(4), tmp_path / "m.onnx")
    cli("checkpoint", tmp_path / "m.onnx", "--out", target, "--budget", "relative_l2=0.5").published()
    found = _diagnosis(target)
    assert found.leaves is not None
    assert (found.leaves.name, found.remedy, found.tried) == ("difference", None, False)
    assert "No remedy is needed, because the budget is met" in (target / "report.html").read_text("utf-8")
    assert "a remedy was looked for" in cli("explain", target).err, "or this test would guard nothing"


def test_the_text_of_explain_does_not_refer_the_user_to_explain() -> None:
    """Explain does not search for a remedy on cpu-bf16."""
    dip = LayerEntry(name="dip", op="Sub", depth=1, sqnr_db=20.0, expected_db=50.0)
    found = explanation.Explanation("cpu-bf16", (dip,), DiagnosisEntry(ails=True, leaves=dip))
    assert explanation.text(found, "the golden samples").endswith("No remedy was looked for on profile cpu-bf16.")


def test_json_has_every_layer(cli: Cli, small: Artifact) -> None:
    said = json.loads(cli("explain", small.path, "--profile", "cpu", "--json").published().out)
    assert said["samples"] == "the golden samples"
    layers = said["profiles"][0]["layers"]
    assert [layer["name"] for layer in layers] == ["relu0", "add1"]
    assert layers[0].keys() == {"name", "op", "weight", "depth", "sqnr_db", "expected_db"}


def test_samples_can_be_given(cli: Cli, small: Artifact) -> None:
    assert "on feeders:three" in cli("explain", small.path, "--samples", "feeders:three").published().out


def test_an_artifact_without_a_residual_cannot_be_explained(cli: Cli, target: Path, onnx_file: Path) -> None:
    cli("checkpoint", onnx_file, "--out", target, "--no-residual", *ONNX_ONLY).published()
    cli("explain", target).refused(2, "--no-residual and keeps no fp32 reference", "convert the checkpoint again")


def test_a_profile_that_the_artifact_lacks_is_rejected(cli: Cli, target: Path, onnx_file: Path) -> None:
    cli("checkpoint", onnx_file, "--out", target, "--profile", "cpu", *ONNX_ONLY).published()
    cli("explain", target, "--profile", "cuda").refused(2, "no ONNX profile 'cuda'", "it has cpu")


def test_layers_of_an_optional_profile_are_measured_only_if_it_is_requested(
    cli: Cli, small: Artifact, onnx_file: Path, target: Path
) -> None:
    told = small.measurements()
    assert told is not None
    assert told.profiles["cpu-bf16"].layers is None
    cli("checkpoint", onnx_file, "--out", target, "--profile", "cpu-bf16", *ONNX_ONLY).published()
    asked = Artifact.open(target).measurements()
    assert asked is not None
    assert asked.profiles["cpu-bf16"].layers is not None


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_a_conversion_measures_its_layers(small: Artifact, profile: str) -> None:
    measurements = small.measurements()
    assert measurements is not None
    layers = measurements.profiles[profile].layers
    assert layers is not None
    assert layers.measured == len(layers.rows) > 1
    assert all(row.sqnr_db > 45 for row in layers.rows)
