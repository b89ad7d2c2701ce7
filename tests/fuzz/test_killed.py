"""SIGKILL at any moment leaves either the old result or the new one, complete; the next run removes leftovers."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import onnx
import pytest
from killing import ProcessResult, Runner, files, runner

import graphs
from bf16kit.artifact.artifact import Artifact

pytestmark = pytest.mark.long  # kills conversions and waits for the next

SHORT, FULL = 12, 50
COUNTS = [SHORT, pytest.param(FULL, marks=pytest.mark.fuzz)]


@pytest.fixture(scope="module")
def forked() -> Iterator[Runner]:
    with runner() as found:
        yield found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two models of the same shape with different weights."""
    directory = tmp_path_factory.mktemp("sources")
    paths = directory / "a.onnx", directory / "b.onnx"
    for seed, path in enumerate(paths):
        onnx.save(graphs.mlp((64, 256, 16), seed=10 * seed), path)
    return paths


def _convert(source: Path, target: Path) -> tuple[str | Path, ...]:
    return "checkpoint", source, "--out", target, "--force"


def _done(ended: ProcessResult) -> ProcessResult:
    assert ended.code == 0, ended.said
    return ended


def _kill(forked: Runner, whole: ProcessResult, random: Random, *arguments: str | Path) -> bool:
    """Kill a run at a random point of what ``whole`` did, chosen by time or by file operation. Half of the points are
    near the end, where the new result replaces the old one. Return whether the run was killed before its end."""
    late = random.random() < 0.5
    if random.random() < 0.5:
        touch = whole.touches() - random.randrange(40 if late else whole.touches())
        return forked.kill_at(*arguments, touch=touch).code == -9
    line, seconds = whole.steps()[-1] if late else random.choice(whole.steps())
    return forked.kill(*arguments, line=line, after=random.uniform(0, 1.2 * seconds)).code == -9


@pytest.mark.parametrize("count", COUNTS)
def test_a_killed_conversion_leaves_the_old_artifact_or_the_new_one(
    tmp_path: Path, forked: Runner, sources: tuple[Path, Path], count: int
) -> None:
    target = tmp_path / "repository" / "m" / "1"
    whole = []
    for number, source in enumerate(sources):
        _done(forked.run(*_convert(source, tmp_path / f"{number}" / "m" / "1")))
        whole.append(files(tmp_path / f"{number}" / "m" / "1"))
    _done(forked.run(*_convert(sources[1], target)))
    run = _done(forked.run(*_convert(sources[0], target)))
    random, found, killed = Random(count), whole[0], 0
    for _ in range(count):
        other = whole[1 - whole.index(found)]
        killed += _kill(forked, run, random, *_convert(sources[whole.index(other)], target))
        Artifact.open(target)  # checks all digests
        assert files(target) in (found, other)
        found = files(target)
        assert all(path.name.startswith(".1.tmp-") for path in target.parent.iterdir() if path != target)
    assert killed > count / 2
    _done(forked.run(*_convert(sources[0], target)))
    assert files(target) == whole[0]
    assert [path.name for path in target.parent.iterdir()] == ["1"]


@pytest.mark.parametrize("count", COUNTS)
def test_a_killed_restore_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, forked: Runner, sources: tuple[Path, Path], count: int
) -> None:
    artifacts = [tmp_path / f"{number}" / "m" / "1" for number in range(2)]
    whole = []
    for source, artifact in zip(sources, artifacts, strict=True):
        _done(forked.run(*_convert(source, artifact)))
        _done(forked.run("restore", artifact, "--out", tmp_path / "whole.safetensors", "--force"))
        whole.append((tmp_path / "whole.safetensors").read_bytes())
    out = tmp_path / "out" / "fp32.safetensors"
    out.parent.mkdir()
    _done(forked.run("restore", artifacts[1], "--out", out))
    run = _done(forked.run("restore", artifacts[0], "--out", out, "--force"))
    random, found, killed = Random(count), whole[0], 0
    for _ in range(count):
        other = whole[1 - whole.index(found)]
        killed += _kill(forked, run, random, "restore", artifacts[whole.index(other)], "--out", out, "--force")
        assert out.read_bytes() in (found, other)
        found = out.read_bytes()
        assert all(path.name.startswith(".fp32.safetensors.tmp-") for path in out.parent.iterdir() if path != out)
    assert killed > count / 4
    _done(forked.run("restore", artifacts[0], "--out", out, "--force"))
    assert out.read_bytes() == whole[0]
    assert [path.name for path in out.parent.iterdir()] == [out.name]
