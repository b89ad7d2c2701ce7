"""``bf16-convert explain EVIDENCE`` on the command line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from converting import ONNX_ONLY, Cli
from failing import cancellation

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.evidence import Evidence, Header
from bf16kit.runtime.loading import load, load_reference

VERDICT = {"state": "over", "cause": "rounding", "output": "y", "metric": "relative_l2", "ratio": 3.5}


@pytest.fixture(scope="module")
def ailing(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return an artifact that is over budget on every input, because of cancellation."""
    from bf16kit.converter.cli import run

    directory = tmp_path_factory.mktemp("ailing")
    onnx.save(cancellation().proto, directory / "m.onnx")
    target = directory / "m" / "1"
    arguments = ("checkpoint", directory / "m.onnx", "--out", target, *ONNX_ONLY, "--allow-over-budget", "--no-search")
    assert run(list(map(str, arguments))) == 0
    return Artifact.open(target)


def breach(artifact: Artifact, profile: str = "cpu") -> Evidence:
    """Return the evidence that a server would keep of one row that it ran on ``artifact``."""
    feeds = {name: array[:1] for name, array in artifact.golden().inputs.items()}
    runtime, reference = load(artifact, profile), load_reference(artifact)
    served, expected = runtime.run(feeds), reference.run(feeds)
    runtime.close()
    reference.close()
    header = Header(
        model="m",
        version=1,
        at="2026-01-01T00:00:00+00:00",
        profile=profile,
        precision="bf16-weights",
        rows=1,
        of_rows=8,
        batch_axis=0,
        budget=artifact.manifest.budget,
        drift={"y": {"relative_l2": 0.05}},
        verdict=VERDICT,
        files={name: entry.sha256 for name, entry in artifact.manifest.files.items()},
        versions={"bf16kit": "0.1.0"},
    )
    return Evidence(header, feeds, served, expected)


def save(evidence: Evidence, path: Path) -> Path:
    path.write_bytes(evidence.dumps())
    return path


@pytest.mark.long
def test_the_layer_that_falls_below_its_prediction_on_this_input_is_named(
    cli: Cli, ailing: Artifact, tmp_path: Path
) -> None:
    said = cli("explain", save(breach(ailing), tmp_path / "e"), "--artifact", ailing.path).published().out
    assert "Evidence of model 'm' version 1, profile cpu (bf16-weights): 1 of the 8 rows of a request" in said
    assert "over, cause rounding, relative_l2 of output 'y' at 3.5 × its budget" in said
    assert "The artifact gives here what was served" in said
    assert "SQNR falls below its prediction at difference (Sub)" in said
    assert said.rstrip().endswith("--keep-fp32 '^(w1|w2)$'")


def test_json_has_the_diagnosis_and_no_payload(cli: Cli, ailing: Artifact, tmp_path: Path) -> None:
    told = cli("explain", save(breach(ailing), tmp_path / "e"), "--artifact", ailing.path, "--json").published().out
    found = json.loads(told)
    assert found["evidence"]["model"] == "m"
    assert found["again"][0].keys() == {"output", "served", "left", "reference", "reproduced"}
    assert found["again"][0]["reproduced"] is True
    assert found["profiles"][0]["leaves"]["name"] == "difference"
    assert "input:" not in told


@pytest.mark.parametrize("value", [100.0, np.nan])
def test_an_output_that_the_artifact_does_not_reproduce_is_blamed_on_the_server_and_no_remedy_is_searched(
    cli: Cli, ailing: Artifact, tmp_path: Path, value: float
) -> None:
    found = breach(ailing)
    damaged = replace(found, served={"y": np.full_like(found.served["y"], value)})
    said = cli("explain", save(damaged, tmp_path / "e"), "--artifact", ailing.path).published().out
    assert "The artifact does not give what was served" in said
    assert "damaged memory, a faulty device, or another program" in said
    assert "SQNR falls below its prediction at difference (Sub)" in said
    assert said.rstrip().endswith("No remedy was looked for, because the artifact does not give what was served.")


def test_a_reference_with_a_different_output_is_reported(cli: Cli, small: Artifact, tmp_path: Path) -> None:
    found = breach(small)
    (name,) = found.served
    other = replace(found, reference={name: found.reference[name] * np.float32(-1)})
    said = cli("explain", save(other, tmp_path / "e"), "--artifact", small.path).published().out
    assert "The fp32 reference gives a different output" in said


def test_bad_input_is_reported_in_one_line(cli: Cli, ailing: Artifact, small: Artifact, tmp_path: Path) -> None:
    good = save(breach(ailing), tmp_path / "good")
    (tmp_path / "text").write_text("hello")
    found = breach(ailing)
    elsewhere = replace(found, header=found.header.model_copy(update={"profile": "torchscript"}))
    wrong = replace(found, feeds={"x": found.feeds["x"].astype(np.float64)})
    for arguments, words in (
        ((good,), "is a file, expected an artifact's directory; if it is an evidence file, pass --artifact DIRECTORY"),
        ((tmp_path / "text", "--artifact", ailing.path), "is not evidence"),
        ((tmp_path / "none", "--artifact", ailing.path), "cannot be read: No such file"),
        ((good, "--artifact", small.path), "is evidence of another artifact"),
        ((good, "--artifact", tmp_path), "not an artifact"),
        ((good, "--artifact", ailing.path, "--samples", "x.npz"), "leave out --samples and --profile"),
        ((save(elsewhere, tmp_path / "a"), "--artifact", ailing.path), "which", ),
        ((save(wrong, tmp_path / "b"), "--artifact", ailing.path), "input 'x' has dtype float64, expected float32"),
    ):  # fmt: skip
        outcome = cli("explain", *arguments)
        assert outcome.code == 2, arguments
        assert words in outcome.err, outcome.err
        assert len(outcome.err.strip().splitlines()) == 1, outcome.err
