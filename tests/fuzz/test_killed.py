"""SIGKILL at any moment: what was there before is whole, or what replaces it is, and the next run tidies up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import onnx
import pytest
from killing import Ended, Runner, files, runner

import graphs
from bf16kit.artifact import Artifact

SHORT, FULL = 12, 50
COUNTS = [SHORT, pytest.param(FULL, marks=pytest.mark.fuzz)]


@pytest.fixture(scope="module")
def forked() -> Iterator[Runner]:
    with runner() as found:
        yield found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one shape and different weights."""
    directory = tmp_path_factory.mktemp("sources")
    paths = directory / "a.onnx", directory / "b.onnx"
    for seed, path in enumerate(paths):
        onnx.save(graphs.mlp((64, 256, 16), seed=10 * seed), path)
    return paths


def _convert(source: Path, target: Path) -> tuple[str | Path, ...]:
    return "checkpoint", source, "--out", target, "--force"


def _done(ended: Ended) -> Ended:
    assert ended.code == 0, ended.said
    return ended


def _steps(ended: Ended) -> list[str]:
    """The lines by which a run says what it does, but for the names in them."""
    return re.findall(r"^bf16-convert: \w+", ended.said, re.MULTILINE)


@pytest.mark.parametrize("count", COUNTS)
def test_a_killed_conversion_leaves_the_artifact_before_it_or_the_one_it_made(
    tmp_path: Path, forked: Runner, sources: tuple[Path, Path], count: int
) -> None:
    target = tmp_path / "repository" / "m" / "1"
    whole = []
    for number, source in enumerate(sources):
        _done(forked.run(*_convert(source, tmp_path / f"{number}" / "m" / "1")))
        whole.append(files(tmp_path / f"{number}" / "m" / "1"))
    steps = _steps(_done(forked.run(*_convert(sources[0], target))))
    random, found, killed_in = Random(count), whole[0], Counter[str]()
    for _ in range(count):
        other = whole[1 - whole.index(found)]
        line = random.choice([*steps, *steps[-1:] * 3])  # more often when it publishes
        ended = forked.kill(*_convert(sources[whole.index(other)], target), line=line, after=random.uniform(0, 0.03))
        killed_in[line] += ended.code == -9
        Artifact.open(target)  # with all its digests
        assert files(target) in (found, other)
        found = files(target)
        assert all(path.name.startswith(".1.tmp-") for path in target.parent.iterdir() if path != target)
    assert killed_in.total() > count / 2, killed_in
    _done(forked.run(*_convert(sources[0], target)))
    assert files(target) == whole[0]
    assert [path.name for path in target.parent.iterdir()] == ["1"]


@pytest.mark.parametrize("count", COUNTS)
def test_a_killed_restore_leaves_the_file_before_it_or_the_one_it_made(
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
    steps = _steps(_done(forked.run("restore", artifacts[0], "--out", out)))
    random, found, killed = Random(count), whole[0], 0
    for _ in range(count):
        other = whole[1 - whole.index(found)]
        ended = forked.kill(
            "restore", artifacts[whole.index(other)], "--out", out, "--force",
            line=random.choice(steps), after=random.uniform(0, 0.004),
        )  # fmt: skip
        killed += ended.code == -9
        assert out.read_bytes() in (found, other)
        found = out.read_bytes()
        assert all(path.name.startswith(".fp32.safetensors.tmp-") for path in out.parent.iterdir() if path != out)
    assert killed > count / 4
    _done(forked.run("restore", artifacts[0], "--out", out, "--force"))
    assert out.read_bytes() == whole[0]
    assert [path.name for path in out.parent.iterdir()] == [out.name]
