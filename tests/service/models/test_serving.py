import os
from pathlib import Path

import pytest

from bf16kit.messages.errors import ConfigError
from bf16kit.service.drift.contract import FallbackPolicy
from bf16kit.service.models.serving import Serving, load_serving


def load(directory: Path, text: str) -> Serving:
    (directory / "serving.yaml").write_text(text, "utf-8")
    return load_serving(directory)


def test_the_keys_of_the_file_replace_the_defaults(tmp_path: Path) -> None:
    serving = load_serving(tmp_path)
    assert (serving.max_queue_delay_ms, serving.shadow.rate) == (0, 0.01)
    assert serving.version_policy.choose([1, 3, 2]) == [3]
    serving = load(
        tmp_path,
        "max_batch_size: 8\nmax_queue_delay_ms: 2.5\nmax_queue_size: 10\ninstances: 2\nversion_policy: all\n"
        "warmup: [1, 8]\nshadow: {rate: 1.0, max_per_second: 5, max_rows: 2}\n"
        "fallback: {policy: fp32, clean_samples: 50}\n"
        "budget: {relative_l2: 0.01, max_abs: null}\n",
    )
    assert (serving.max_batch_size, serving.max_queue_size, serving.warmup) == (8, 10, (1, 8))
    assert serving.version_policy.choose([5, 1]) == [1, 5]
    assert load(tmp_path, "version_policy: {latest: 2}").version_policy.choose([5, 1, 3]) == [3, 5]
    assert load(tmp_path, "version_policy: {specific: [5, 1]}").version_policy.choose([5, 1, 3]) == [1, 5]
    assert serving.budget == {"relative_l2": 0.01, "max_abs": None}
    assert serving.fallback == FallbackPolicy(policy="fp32", clean_samples=50)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", FallbackPolicy(policy="alert")),  # a fallback takes the memory of the fp32 model: users must ask for it
        ("fallback: off", FallbackPolicy(policy="off")),  # which YAML reads as false, without quotes
        ("fallback: {policy: off}", FallbackPolicy(policy="off")),
        ("fallback: fp32", FallbackPolicy(policy="fp32")),
        (
            "fallback: {policy: fp32, min_stay_seconds: 1, clean_samples: 20}",
            FallbackPolicy(policy="fp32", min_stay_seconds=1, clean_samples=20),
        ),
    ],
)
def test_a_fallback_is_a_word_or_a_mapping_with_numbers(tmp_path: Path, text: str, policy: FallbackPolicy) -> None:
    assert load(tmp_path, text).fallback == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fallback: on", "'fallback.policy' is True: input should be 'off', 'alert' or 'fp32'"),
        ("fallback: {policy: fp32, clean_samples: 0}", r"'fallback\.clean_samples' is 0"),
        ("fallback: {policy: fp32, stay: 1}", r"unknown key 'fallback\.stay'"),
        ("fallback: {min_stay_seconds: 86401}", r"'fallback\.min_stay_seconds' is 86401"),
        (
            "fallback: fp32\nshadow: {rate: 0}",
            r"needs live drift measurement, but shadow\.rate is 0; raise it, or set",
        ),
        ("max_batch: 3", r"unknown key 'max_batch' \(did you mean max_batch_size\?\)$"),
        ("version_policy: 3", r"'version_policy' is 3: give keys and values, \{key: value\}$"),
        ("warmup: 3", r"'warmup' is 3: give a list, \[a, b\]$"),
        ("shadow: {rate: 2}", r"'shadow\.rate' is 2"),
        ("shadow: {max_per_second: 0}", r"'shadow\.max_per_second' is 0"),
        ("version_policy: {latest: 1, all: true}", "give exactly one of"),
        ("version_policy: {specific: [1], strict: true}", "strict: true needs latest: N"),
        ("version_policy: {oldest: 1}", r"unknown key 'version_policy\.oldest'"),
        ("instances: 0", "'instances' is 0: input should be greater than"),
        ("instances: 65", "'instances' is 65"),
        ("max_dims: {seq: 0}", r"'max_dims\.seq' is 0"),
        ("max_queue_delay_ms: -1", "'max_queue_delay_ms' is -1"),
        ("budget: {relative_l2: much}", r"'budget\.relative_l2' is 'much'"),
        ("labels: {y: &a [*a]}", r"serving\.yaml: line 1: \*a is an alias"),
        ("max_batch_size: [" + "0, " * 10_000 + "]", r"'max_batch_size' is \[0, 0, 0, 0, 0, 0, \.\.\.\]: input should"),
        (f"{'k' * 1000}: 1", "unknown key 'k{100}'…; known keys"),
    ],
)
def test_the_error_names_the_wrong_key_or_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        load(tmp_path, text)
    assert len(str(refusal.value)) < 1500


def test_labels_are_the_lines_of_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("tabby cat\nt\u00eate\n\nlast\n\n")
    found = load(tmp_path, "labels: {logits: classes.txt}\n")
    assert found.labels == {"logits": ("tabby cat", "t\u00eate", "", "last")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", r"serving\.yaml: 'labels\.y': 'none\.txt': cannot be read"),
        ("../classes.txt", r"'labels\.y' is '\.\./classes\.txt': name a file in the model's directory"),
        ("5", r"'labels\.y' is 5: name a file"),
        ('"a\\0b"', "'labels.y' is 'a.x00b': name a file in the model's directory"),
        ('"a\\ud800"', "'labels.y' is 'a.ud800': name a file in the model's directory"),
        (f"{'x' * 30_000}/", "'labels.y' is 'x{100}'…: name a file"),
        ("pipe", r"'labels\.y': 'pipe': not a regular file"),
        ("latin.txt", r"'labels\.y': 'latin\.txt': not UTF-8"),
        ("large.txt", r"'labels\.y': 'large\.txt': larger than 16 MiB"),
    ],
)
def test_labels_that_cannot_be_read_are_an_error(tmp_path: Path, name: str, message: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.txt").write_bytes(b"t\xeate\n")
    with (tmp_path / "large.txt").open("wb") as large:
        large.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match=message) as refusal:
        load(tmp_path, f"labels: {{y: {name}}}")
    assert len(str(refusal.value)) < 1500


def test_a_file_that_is_no_plain_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    """A pipe would block the thread that scans the repository permanently; a device would fill the memory."""
    os.mkfifo(tmp_path / "serving.yaml")
    with pytest.raises(ConfigError, match=r"serving\.yaml: not a regular file"):
        load_serving(tmp_path)
    for target, words in (("/dev/zero", "not a regular file"), (tmp_path / "unmounted", "cannot be read")):
        (tmp_path / "serving.yaml").unlink()
        (tmp_path / "serving.yaml").symlink_to(target)
        with pytest.raises(ConfigError, match=rf"serving\.yaml: {words}"):  # the defaults do not take its place
            load_serving(tmp_path)
    (tmp_path / "serving.yaml").unlink()
    with (tmp_path / "serving.yaml").open("wb") as large:
        large.truncate((64 << 10) + 1)
    with pytest.raises(ConfigError, match=r"serving\.yaml: larger than 64 KiB"):
        load_serving(tmp_path)


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory in a repository; beside the repository there is a file ``secret``."""
    (tmp_path / "secret").write_text("a\nb\n")
    (tmp_path / "repository" / "m").mkdir(parents=True)
    return tmp_path / "repository" / "m"


@pytest.mark.parametrize("target", ["../../secret", "/proc/self/status", "absolute", "link"])
def test_a_file_that_a_link_takes_from_outside_the_repository_is_an_error(model: Path, target: str) -> None:
    """A client could read the file: the server answers with labels."""
    outside = model.parent.parent / "secret"
    (model / "link").symlink_to(outside)
    (model / "classes.txt").symlink_to(outside if target == "absolute" else target)
    with pytest.raises(ConfigError, match=rf"'labels\.y': 'classes\.txt': a link out of {model.parent}; put the file"):
        load(model, "labels: {y: classes.txt}")
    (model / "serving.yaml").unlink()
    (model / "serving.yaml").symlink_to(outside)
    with pytest.raises(ConfigError, match=rf"serving\.yaml: a link out of {model.parent}; put the file itself there"):
        load_serving(model)


def test_links_within_the_repository_are_followed(model: Path, tmp_path: Path) -> None:
    """A Kubernetes volume has them, in a model's directory or above it, and models may share a file."""
    (model / "..2026").mkdir()
    (model / "..data").symlink_to("..2026")
    (model / "..2026" / "serving.yaml").write_text("labels: {y: classes.txt}")
    (model / "serving.yaml").symlink_to("..data/serving.yaml")
    (model.parent / "shared.txt").write_text("a\nb\n")
    (model / "classes.txt").symlink_to("../shared.txt")
    (model.parent / "alias").symlink_to("m")
    for directory in (model, model.parent / "alias"):
        assert load_serving(directory).labels == {"y": ("a", "b")}
    (model / "serving.yaml").unlink()
    (model / "serving.yaml").symlink_to("..2026/serving.yaml")
    (model / "..2026" / "serving.yaml").write_text("max_batch_size: 3")
    elsewhere = model.rename(tmp_path / "elsewhere")
    model.symlink_to(elsewhere)
    assert load_serving(model).max_batch_size == 3
