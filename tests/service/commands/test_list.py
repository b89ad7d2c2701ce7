"""``bf16-serve list``: shows a repository by its manifests."""

from pathlib import Path

from commanded import Run, one_line, read

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import DriftEntry
from bf16kit.artifact.manifest import ExportEntry


def rows(repository: Path, run: Run) -> dict[tuple[str, int], dict[str, object]]:
    found = read(run("list", "--repository", repository, "--json"))
    return {(row["model"], row["version"]): row for row in found["models"]}


def test_versions_that_the_policy_excludes_have_the_reason(repository: Path, run: Run) -> None:
    for policy, served, why in (
        ("latest: 1", 2, "latest: 1"),
        ("latest: 1, strict: true", 2, "latest: 1, strict: true"),
        ("specific: [1]", 1, "specific: [1]"),
    ):
        (repository / "mlp" / "serving.yaml").write_text(f"version_policy: {{{policy}}}\n")
        found = rows(repository, run)
        assert found["mlp", served]["served"] is True
        other = found["mlp", 3 - served]
        assert (other["served"], other["why"]) == (False, f"version_policy is {why}")


def test_a_row_has_the_values_of_the_manifest_and_the_weights_are_not_read(repository: Path, run: Run) -> None:
    """That makes the command quick; it does not detect a wrong bit in the weights."""
    weights = repository / "mlp" / "2" / "weights.bf16"
    weights.write_bytes(bytes(weights.stat().st_size))
    row = rows(repository, run)["mlp", 2]
    assert row["weight_bytes"] == 2 * 16 * 16 * 2
    assert row["disk_bytes"] == sum(file.stat().st_size for file in weights.parent.iterdir())
    assert (row["residual"], row["reference"], row["golden"]) == (True, True, True)
    assert row["profiles"] == [{"name": "cpu", "format": "onnx", "verified": "host", "tightest": None}]
    assert (row["source"], row["served"]) == ("test", True)


def test_drift_is_compared_with_the_budget_that_the_server_would_use(repository: Path, run: Run) -> None:
    path = repository / "mlp" / "2"
    manifest = Artifact.open(path).manifest
    entry = DriftEntry(samples=4, source="random", outputs={"y": {"relative_l2": {"mean": 0.003, "worst": 0.004}}})
    (path / "manifest.json").write_bytes(manifest.amended(drift={"cpu": entry}).dumps())
    text = run("list", "--repository", repository).stdout
    assert "cpu 20%" in text
    (repository / "mlp" / "serving.yaml").write_text("budget: {relative_l2: 1.0e-3}\n")
    text = run("list", "--repository", repository).stdout
    assert "cpu 300% OVER" in text


def test_a_damaged_version_is_a_failure_only_if_it_is_served(repository: Path, run: Run) -> None:
    (repository / "mlp" / "1" / "manifest.json").unlink()
    result = run("list", "--repository", repository)
    assert result.exit_code == 0
    assert "it has no manifest.json" in result.stdout
    weights = repository / "mlp" / "2" / "weights.bf16"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = run("list", "--repository", repository)
    assert result.exit_code == 1
    assert "model 'mlp' version 2:" in result.stdout
    assert "the manifest says" in result.stdout


def test_a_broken_serving_yaml_is_a_problem_of_every_version(repository: Path, run: Run) -> None:
    (repository / "mlp" / "serving.yaml").write_text("instances: many\n")
    found = rows(repository, run)
    assert [row["problem"] for row in found.values()] == [found["mlp", 1]["problem"]] * 2
    assert "'instances' is 'many'" in str(found["mlp", 1]["problem"])


def test_a_directory_that_is_not_a_model_is_listed_with_the_reason_and_control_characters_escaped(
    repository: Path, run: Run
) -> None:
    (repository / "a\x1b[2Jb").mkdir()
    result = run("list", "--repository", repository)
    assert result.exit_code == 0
    assert "is skipped: a model's name may contain only letters" in result.stdout
    assert "\x1b" not in result.stdout
    assert "\\x1b[2Jb" in result.stdout


def test_an_empty_repository_is_no_failure_and_a_missing_one_is_wrong_usage(tmp_path: Path, run: Run) -> None:
    result = run("list", "--repository", tmp_path)
    assert (result.exit_code, "has no model" in result.stdout) == (0, True)
    result = run("list", "--repository", tmp_path / "gone")
    assert (result.exit_code, "is not a directory" in one_line(result)) == (2, True)


def test_an_artifact_with_only_an_export_is_a_failure_if_it_should_be_served(repository: Path, run: Run) -> None:
    path = repository / "mlp" / "2"
    manifest = Artifact.open(path).manifest
    entry = ExportEntry(files=["weights.bf16"], precision="bf16-weights", verified="host")
    (path / "manifest.json").write_bytes(manifest.amended(profiles={}, exports={"safetensors": entry}).dumps())
    result = run("list", "--repository", repository)
    assert result.exit_code == 1
    assert "model 'mlp' version 2: holds no profile to serve, only safetensors for other programs" in result.stdout
