"""Artifacts that bf16-convert wrote at each schema version are read, verified, restored and served.

``tests/artifacts/README.md`` names the commit that wrote each.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inprocess
import numpy as np
import pytest
import tritonclient.grpc as triton
from safetensors.numpy import load_file
from sources import digest
from tritonclient.utils import np_to_triton_dtype

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST, SCHEMA_VERSION
from bf16kit.converter.cli import run

CORPUS = Path(__file__).parents[1] / "artifacts"
PATHS = {f"{path.parent.parent.name}/{path.parent.name}": path for path in sorted(CORPUS.glob("schema-*/*/1"))}
RESTORED = {name: sha256 for sha256, name in map(str.split, (CORPUS / "restored.sha256").read_text().splitlines())}
every = pytest.mark.parametrize("name", PATHS)


def fields_of(name: str) -> dict[str, Any]:
    """Return the manifest as it was written."""
    fields: dict[str, Any] = json.loads((PATHS[name] / MANIFEST).read_bytes())
    return fields


def schema_of(name: str) -> int:
    return int(name.partition("/")[0].removeprefix("schema-"))


#: The profile that is served of each artifact, which is not a mere export.
SERVED = {
    name: next(profile for profile in ("cpu-bf16", "cpu", "torchscript", "pt2") if profile in profiles)
    for name in PATHS
    if (profiles := fields_of(name)["profiles"])
}


def verified() -> Iterator[tuple[str, str]]:
    """Yield every profile and export of a schema version once, and one of each other artifact.

    All would take half a minute.
    """
    known: set[tuple[int, str]] = set()
    for name in PATHS:
        fields = fields_of(name)
        new = {(schema_of(name), profile) for profile in (*fields["profiles"], *fields.get("exports", ()))} - known
        yield from (
            (name, profile) for profile in sorted(profile for _, profile in new) or [SERVED.get(name, "safetensors")]
        )
        known |= new


def test_there_are_artifacts_of_every_schema_version_and_the_readme_names_each() -> None:
    """Whoever raises the version adds artifacts: CONTRIBUTING.md says how."""
    assert {schema_of(name) for name in PATHS} == set(range(1, SCHEMA_VERSION + 1))
    assert all(fields_of(name)["schema_version"] == schema_of(name) for name in PATHS)
    readme = (CORPUS / "README.md").read_text("utf-8")
    assert [name for name in PATHS if f"| `{name}` |" not in readme] == []


@every
def test_its_manifest_is_read_and_every_file_is_as_it_was_written(name: str) -> None:
    """A manifest that is written again has the same fields. The first of version 3 name requirements in one place."""
    manifest = Artifact.open(PATHS[name]).manifest
    found, written = json.loads(manifest.dumps()), fields_of(name)
    required = written.pop("requires", None)
    if required:
        assert [entry.pop("requires") for entry in found["profiles"].values()] == [required] * len(written["profiles"])
        assert found.pop("digest") != written.pop("digest")
    assert found == written


@every
def test_its_measurements_are_read_and_none_is_added(name: str) -> None:
    """The rest of a recovery is ignored: earlier versions recorded more."""
    file, measured = PATHS[name] / "measurements.json", Artifact.open(PATHS[name]).measurements()
    assert (measured is not None) == file.exists() == (schema_of(name) > 2)
    if measured is not None:
        found, written = json.loads(measured.dumps()), json.loads(file.read_bytes())
        assert ("recovery" in found) == ("recovery" in written)
        found["recovery"] = written.setdefault("recovery", None)
        assert _stated(found) == _stated(written)


def _stated(value: Any) -> Any:
    """Return ``value`` without what is null, and floats in the seven digits that measurements are written in now."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _stated(each) for key, each in value.items() if each is not None}
    return [_stated(each) for each in value] if isinstance(value, list) else value


@every
def test_inspect_says_what_older_versions_did_not_measure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(PATHS[name])]) == 0
    text, schema = capsys.readouterr().out, schema_of(name)
    assert ("judged by the older measure, without slices" in text) == (schema < 7)
    assert ("because the artifact is older than that check" in text) == (schema < 3)
    assert ("runs with " in text) == (schema > 2 and '"requires"' in (PATHS[name] / MANIFEST).read_text())
    recovered = name.endswith("recovered")
    assert ("10 steps on the cpu" in text) == recovered
    assert ("whose weights were kept" in text) == (recovered and schema > 5)  # the first did not keep the best


@pytest.mark.parametrize(("name", "profile"), list(verified()))
def test_a_profile_or_export_is_within_budget_on_the_golden_samples(name: str, profile: str) -> None:
    assert run(["verify", str(PATHS[name]), "--profile", profile]) == 0


@pytest.mark.parametrize("name", RESTORED)
def test_the_fp32_checkpoint_that_it_was_made_from_is_restored(name: str, tmp_path: Path) -> None:
    out = tmp_path / "fp32.safetensors"
    assert run(["restore", str(PATHS[name]), "--out", str(out)]) == 0
    assert digest(load_file(out)) == RESTORED[name]


def test_all_with_a_residual_are_restored() -> None:
    assert set(RESTORED) == {name for name in PATHS if (PATHS[name] / "residual.bin").exists()}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    """Return a client of one server that has every artifact of :data:`SERVED`."""
    repository = tmp_path_factory.mktemp("repository")
    models = {name: name.replace("/", "-") for name in SERVED}
    for name, model in models.items():
        shutil.copytree(PATHS[name], repository / model / "1")
        (repository / model / "serving.yaml").write_text(f"profile: {SERVED[name]}\n", "utf-8")
    with (
        inprocess.running(repository, *models.values()) as address,
        triton.InferenceServerClient(address) as found,
    ):
        yield found


@pytest.mark.parametrize("name", SERVED)
def test_it_is_served_and_answers_its_golden_samples_within_budget(
    name: str, client: triton.InferenceServerClient
) -> None:
    """The server has judged the same samples by the whole budget before it was ready."""
    manifest = fields_of(name)
    golden = load_file(PATHS[name] / (manifest["profiles"][SERVED[name]].get("golden") or manifest["golden"]))
    inputs = []
    for key, array in golden.items():
        if key.startswith("input:"):
            inputs.append(triton.InferInput(key[6:], list(array.shape), np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
    answer = client.infer(name.replace("/", "-"), inputs)
    outputs = {key[7:]: array for key, array in golden.items() if key.startswith("output:")}
    assert outputs.keys() == {entry["name"] for entry in manifest["outputs"]}
    for output, expected in outputs.items():
        found = answer.as_numpy(output)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        bound = manifest["budget"]["relative_l2"] * np.linalg.norm(expected)
        assert 0 < np.linalg.norm(found - expected) <= bound, output
