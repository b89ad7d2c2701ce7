"""One checkpoint of many is converted in its own process. However that ends, the next run knows what is done."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import graphs
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST
from converter.bulk.item import RECORDS, Outcome, convert
from converter.bulk.worklist import Item


@pytest.fixture
def item(tmp_path: Path) -> Item:
    onnx.save(graphs.mlp(), tmp_path / "m.onnx")
    return Item("m", tmp_path / "m.onnx", (tmp_path / "m.onnx",), ())


class _Started:
    """Starts a process that runs ``code`` instead of a conversion, and records its command."""

    def __init__(self, code: str, small: Artifact | None = None) -> None:
        self.commands: list[list[str]] = []
        self._code = code
        self._small = small

    def __call__(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        self.commands.append(command)
        if self._small is not None:
            shutil.copytree(self._small.path, command[command.index("--out") + 1])
        with log.open("wb") as file:
            return subprocess.Popen([sys.executable, "-c", self._code], stdout=file, stderr=file)

    @property
    def targets(self) -> list[str]:
        return [command[command.index("--out") + 1] for command in self.commands]


def _replace(version: Path) -> None:
    """Replace the artifact in ``version`` by one with another seed."""
    manifest = Artifact.open(version, verify=False).manifest
    (version / MANIFEST).write_bytes(manifest.model_copy(update={"seed": manifest.seed + 1}).dumps())


def _ends(item: Item, repository: Path, code: str) -> Outcome:
    return convert(item, repository, start=_Started(code))


@pytest.mark.parametrize(
    ("code", "status", "exits", "said"),
    [
        (
            "import sys; print('bf16-convert: error: drift over budget'); sys.exit(1)",
            "over budget",
            1,
            "drift over budget",
        ),
        ("import sys; print('bf16-convert: error: m: bad\\nmore'); sys.exit(3)", "failed", 3, "m: bad\nmore"),
        ("import sys; print('Usage: x\\n\\nError: no such option'); sys.exit(2)", "failed", 2, "no such option"),
        ("import sys; sys.exit(130)", "interrupted", 130, ""),
        ("import os; os.kill(os.getpid(), 9)", "failed", 3, "killed by SIGKILL (out of memory?)"),
        ("import os; os.kill(os.getpid(), 11)", "failed", 3, "killed by SIGSEGV"),
        ("import sys; sys.exit(3)", "failed", 3, "exit code 3"),
        ("import sys; sys.exit(1)", "failed", 3, "ended without a message, exit code 1; "),
        ("raise ValueError('boom')", "failed", 3, "ended without a message, exit code 1; "),
    ],
)
def test_the_outcome_states_how_the_process_ended(
    item: Item, tmp_path: Path, code: str, status: str, exits: int, said: str
) -> None:
    found = _ends(item, tmp_path / "r", code)
    assert (found.status, found.code, found.version) == (status, exits, None)
    assert found.detail.startswith(said)


def test_a_rejected_source_starts_no_process(item: Item, tmp_path: Path) -> None:
    started = _Started("")
    refused = Item("g", item.source, (), (), problem="is a GGUF file")
    assert convert(refused, tmp_path / "r", start=started) == Outcome(
        "g", "m.onnx", "failed", 2, detail="is a GGUF file"
    )
    assert started.commands == []


def test_a_source_that_no_longer_exists_is_reported(item: Item, tmp_path: Path) -> None:
    item.source.unlink()
    found = convert(item, tmp_path / "r", start=_Started(""))
    assert (found.code, found.detail) == (2, "cannot be read: No such file or directory")


class TestRepeatedRuns:
    def test_a_published_checkpoint_is_not_converted_again(self, item: Item, tmp_path: Path, small: Artifact) -> None:
        started = _Started("", small)
        assert convert(item, tmp_path / "r", start=started).status == "converted"
        again = convert(item, tmp_path / "r", start=started)
        assert (again.status, again.code, again.version) == ("done before", 0, 1)
        assert "cpu" in again.detail
        assert len(started.commands) == 1

    def test_other_bytes_or_options_make_the_next_version(self, item: Item, tmp_path: Path, small: Artifact) -> None:
        started = _Started("", small)
        convert(item, tmp_path / "r", start=started)
        convert(Item(item.model, item.source, item.files, ("--seed", "1")), tmp_path / "r", start=started)
        onnx.save(graphs.mlp((8, 8, 8)), item.source)
        convert(item, tmp_path / "r", start=started)
        assert started.targets == [str(tmp_path / "r" / "m" / version) for version in "123"]

    def test_a_conversion_that_was_killed_before_publishing_is_repeated(
        self, item: Item, tmp_path: Path, small: Artifact
    ) -> None:
        assert _ends(item, tmp_path / "r", "import os; os.kill(os.getpid(), 9)").status == "failed"
        assert convert(item, tmp_path / "r", start=_Started("", small)).version == 1

    def test_a_conversion_that_was_killed_after_publishing_is_done(
        self, item: Item, tmp_path: Path, small: Artifact
    ) -> None:
        """The record is written before the process starts, so it shows that the version was published since."""
        started = _Started("import os; os.kill(os.getpid(), 9)", small)
        assert convert(item, tmp_path / "r", start=started).status == "failed"
        assert convert(item, tmp_path / "r", start=started).status == "done before"

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"digest": 3, "version": "1"}', '{"version": true}'])
    def test_an_invalid_record_is_ignored(self, item: Item, tmp_path: Path, small: Artifact, content: str) -> None:
        (tmp_path / "r" / RECORDS).mkdir(parents=True)
        (tmp_path / "r" / RECORDS / "m.json").write_text(content)
        assert convert(item, tmp_path / "r", start=_Started("", small)).version == 1

    def test_force_replaces_the_newest_version(self, item: Item, tmp_path: Path, small: Artifact) -> None:
        convert(item, tmp_path / "r", start=_Started("", small))
        started = _Started("")
        assert convert(item, tmp_path / "r", force=True, start=started).version == 1
        assert "--force" in started.commands[0]

    def test_force_that_fails_keeps_the_published_version_and_its_record(
        self, item: Item, tmp_path: Path, small: Artifact
    ) -> None:
        convert(item, tmp_path / "r", start=_Started("", small))
        old = item.source.read_bytes()
        onnx.save(graphs.mlp((8, 8, 8)), item.source)
        over = _Started("import sys; print('bf16-convert: error: drift'); sys.exit(1)")
        assert convert(item, tmp_path / "r", force=True, start=over).status == "over budget"
        assert convert(item, tmp_path / "r", start=over).status == "over budget"
        item.source.write_bytes(old)
        assert convert(item, tmp_path / "r", start=over).status == "done before"

    def test_force_that_was_killed_with_its_parent_is_not_done(
        self, item: Item, tmp_path: Path, small: Artifact
    ) -> None:
        convert(item, tmp_path / "r", start=_Started("", small))
        onnx.save(graphs.mlp((8, 8, 8)), item.source)

        def killed(command: list[str], log: Path) -> subprocess.Popen[bytes]:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(item, tmp_path / "r", force=True, start=killed)
        assert convert(item, tmp_path / "r", start=_Started("", small)).status == "converted"

    def test_force_that_published_before_its_parent_was_killed_is_done(
        self, item: Item, tmp_path: Path, small: Artifact
    ) -> None:
        convert(item, tmp_path / "r", start=_Started("", small))
        onnx.save(graphs.mlp((8, 8, 8)), item.source)

        def killed(command: list[str], log: Path) -> subprocess.Popen[bytes]:
            _replace(tmp_path / "r" / "m" / "1")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(item, tmp_path / "r", force=True, start=killed)
        assert convert(item, tmp_path / "r", start=_Started("")).status == "done before"

    def test_a_version_that_another_program_replaced_is_not_done(
        self, item: Item, tmp_path: Path, small: Artifact
    ) -> None:
        convert(item, tmp_path / "r", start=_Started("", small))
        _replace(tmp_path / "r" / "m" / "1")
        assert convert(item, tmp_path / "r", start=_Started("", small)).version == 2

    def test_a_version_from_elsewhere_is_not_replaced(self, item: Item, tmp_path: Path, small: Artifact) -> None:
        shutil.copytree(small.path, tmp_path / "r" / "m" / "7")
        assert convert(item, tmp_path / "r", start=_Started("", small)).version == 8

    def test_a_version_that_is_no_longer_an_artifact_is_converted_again(
        self, item: Item, tmp_path: Path, small: Artifact
    ) -> None:
        convert(item, tmp_path / "r", start=_Started("", small))
        (tmp_path / "r" / "m" / "1" / "manifest.json").unlink()
        assert convert(item, tmp_path / "r", start=_Started("", small)).version == 2

    def test_the_record_has_the_digest_the_version_and_its_manifest(
        self, item: Item, tmp_path: Path, small: Artifact
    ) -> None:
        convert(item, tmp_path / "r", start=_Started("", small))
        kept = json.loads((tmp_path / "r" / RECORDS / "m.json").read_text())
        manifest = hashlib.sha256((tmp_path / "r" / "m" / "1" / MANIFEST).read_bytes()).hexdigest()
        assert kept == {"digest": item.digest(), "version": 1, "manifest": manifest}
