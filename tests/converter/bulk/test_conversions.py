"""One checkpoint of many is converted in its own process. However that ends, the next run knows what is done."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST
from converter.bulk.conversions import RECORDS, Outcome, Run, convert, run_here
from converter.bulk.worklist import Item

Convert = Callable[..., Outcome]


@pytest.fixture
def item(tmp_path: Path) -> Item:
    onnx.save(graphs.mlp(), tmp_path / "m.onnx")
    return Item("m", tmp_path / "m.onnx", [], [tmp_path / "m.onnx"])


def ending(code: str) -> Run:
    """Return what runs the Python program ``code`` in a process instead of a conversion."""
    return lambda _, log, stop: run_here([sys.executable, "-c", code], log, stop)


@pytest.fixture
def converted(item: Item, tmp_path: Path, small: Artifact) -> Convert:
    """Return what converts ``item``, or another; the "conversion" publishes ``small``."""
    (tmp_path / "r" / RECORDS).mkdir(parents=True)

    def publish(command: list[str], _log: Path, _stop: threading.Event) -> int:
        shutil.copytree(small.path, command[command.index("--out") + 1], dirs_exist_ok="--force" in command)
        return 0

    def run(other: Item = item, how: Run = publish, *, force: bool = False) -> Outcome:
        return convert(other, tmp_path / "r", how, threading.Event(), force=force)

    return run


@pytest.mark.parametrize(
    ("code", "status", "exits", "said"),
    [
        ("import sys; print('bf16-convert: error: drift over budget'); sys.exit(1)", "over budget", 1, "drift over"),
        ("import sys; print('bf16-convert: error: m: bad\\nmore'); sys.exit(3)", "failed", 3, "m: bad"),
        ("import sys; sys.exit(130)", "interrupted", 130, ""),
        ("import os; os.kill(os.getpid(), 9)", "failed", 3, "killed by SIGKILL (out of memory?)"),
        ("import os; os.kill(os.getpid(), 11)", "failed", 3, "ended with exit code -11; see "),
        ("raise ValueError('boom')", "failed", 3, "ended with exit code 1; see "),
    ],
)
def test_the_outcome_states_how_the_process_ended(
    converted: Convert, code: str, status: str, exits: int, said: str
) -> None:
    found = converted(how=ending(code))
    assert (found.status, found.code, found.version) == (status, exits, None)
    assert found.detail.startswith(said)
    assert converted().version == 1


def test_a_source_that_is_unusable_or_gone_starts_no_process(converted: Convert, item: Item) -> None:
    refused = converted(Item("g", item.source, [], [], "is a GGUF file"), ending("1/0"))
    assert (refused.code, refused.detail) == (2, "is a GGUF file")
    item.source.unlink()
    gone = converted(how=ending("1/0"))
    assert (gone.code, gone.detail) == (2, "cannot be read: No such file or directory")


def test_the_same_is_not_converted_again_and_other_bytes_or_options_make_the_next_version(
    converted: Convert, item: Item
) -> None:
    assert converted().status == "converted"
    again = converted(how=ending("1/0"))
    assert (again.status, again.code, again.version) == ("done before", 0, 1)
    assert "cpu" in again.detail
    assert converted(Item("m", item.source, ["--seed", "1"], item.files)).version == 2
    onnx.save(graphs.mlp((8, 8, 8)), item.source)
    assert converted().version == 3


def test_force_replaces_the_newest_version_and_a_failure_keeps_it(converted: Convert, tmp_path: Path) -> None:
    converted()
    assert converted(how=ending("1/0"), force=True).status == "failed"
    assert converted(how=ending("1/0")).status == "done before"
    assert (converted(force=True).version, converted(how=ending("1/0")).status) == (1, "done before")


def test_a_version_from_elsewhere_is_neither_replaced_nor_taken_for_done(
    converted: Convert, tmp_path: Path, small: Artifact
) -> None:
    converted()
    version = tmp_path / "r" / "m" / "1"
    manifest = Artifact.open(version, verify=False).manifest
    (version / MANIFEST).write_bytes(manifest.model_copy(update={"seed": manifest.seed + 1}).dumps())
    assert converted().version == 2
    shutil.copytree(small.path, tmp_path / "r" / "m" / "7")
    (tmp_path / "r" / "m" / "7" / MANIFEST).unlink()
    assert converted().version == 8
