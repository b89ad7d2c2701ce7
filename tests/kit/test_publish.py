"""Publishing is all or nothing: also if the target exists, the process is killed, or the disk is full."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from forbidden import without
from small import publish_small, write_small

from bf16kit.artifact import publish
from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST
from bf16kit.artifact.publish import StagingArtifact, staging
from bf16kit.messages.errors import ArtifactError, ArtifactExists, ConversionError, UsageError

FSYNC = os.fsync
WRITE_AND_HANG = """
import sys
from pathlib import Path
from small import write_small
from bf16kit.artifact.publish import staging
with staging(Path(sys.argv[1])) as staged:
    write_small(staged)
    print("staged", flush=True)
    sys.stdin.read()
"""
FILL = """
import resource, sys
from bf16kit.messages.errors import UsageError
from bf16kit.artifact.publish import staging
if sys.argv[2:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    with staging(sys.argv[1]) as staged, staged.writer("weights.bf16") as weights:
        weights.append_chunks(bytes(1000) for _ in range(4000))
except UsageError as error:
    sys.exit(str(error))
"""


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python process that can import this project and the support modules of its tests."""
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])])
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def publish_after(target: Path, step: Callable[[StagingArtifact], object], *, force: bool = False) -> None:
    """Write the small artifact, call ``step``, and publish."""
    with staging(target, force=force) as staged:
        manifest = write_small(staged)
        step(staged)
        staged.publish(manifest)


def _damage_graph(descriptor: int) -> None:
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    if path.name == "cpu.onnx":
        _flip_last_byte(path)


def _flip_last_byte(path: Path) -> None:
    """Flip a bit of ``path`` and restore its times."""
    data, found = path.read_bytes(), path.stat()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


@contextlib.contextmanager
def hanging_conversion(target: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that is in the middle of writing an artifact to ``target``. It is killed at the end."""
    with python(WRITE_AND_HANG, str(target)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "staged\n"
        try:
            yield process
        finally:
            process.kill()


class TestPublishing:
    def test_an_artifact_is_published_alone_with_every_digest_and_the_same_bytes_each_time(
        self, tmp_path: Path
    ) -> None:
        found = []
        for place in ("a", "b"):
            with staging(tmp_path / place / "m" / "1") as staged:
                manifest = write_small(staged)
                (staged.path / "report.html").write_text("<p>")
                artifact = staged.publish(manifest)
            assert artifact.path == tmp_path / place / "m" / "1"
            assert names(tmp_path / place / "m") == ["1"]
            assert sorted([*Artifact.open(artifact.path).manifest.files, MANIFEST]) == names(artifact.path)
            assert "report.html" in artifact.manifest.files
            found.append({name: (artifact.path / name).read_bytes() for name in names(artifact.path)})
        assert found[0] == found[1]

    def test_a_draft_can_be_run_and_changed_before_it_is_published(self, tmp_path: Path) -> None:
        with staging(tmp_path / "1") as staged:
            draft = staged.draft(write_small(staged))
            assert draft.restore("w").shape == (10, 6)
            staged.remove("cpu.onnx")
            (staged.path / "cpu.onnx").write_bytes(b"b graph")
            staged.publish(draft.manifest)
        assert Artifact.open(tmp_path / "1").file("cpu.onnx").read_bytes() == b"b graph"

    @pytest.mark.parametrize("name", ["cpu.onnx", "weights.bf16"])
    def test_a_file_that_changes_after_a_draft_is_not_published(self, tmp_path: Path, name: str) -> None:
        """This holds even if the change comes at once, keeps the size, and restores the file's times."""
        with staging(tmp_path / "1") as staged:
            manifest = write_small(staged)
            assert staged.draft(manifest).restore("w").shape == (10, 6)
            _flip_last_byte(staged.path / name)
            with pytest.raises(ConversionError, match=f"(?s)changed after it was written.*{name}"):
                staged.publish(manifest)
        assert names(tmp_path) == []

    def test_a_file_that_changes_while_it_is_published_is_not_published(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk, not another program, changes the file: the draft has no reason to read it again."""
        with staging(tmp_path / "1") as staged:
            manifest = write_small(staged)
            monkeypatch.setattr(os, "fsync", _damage_graph)
            with pytest.raises(ConversionError, match=r"(?s)changed after it was written.*cpu\.onnx: its sha256 is"):
                staged.publish(manifest)
        assert names(tmp_path) == []

    def test_every_file_and_every_directory_that_was_made_is_synced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A directory's name is stored in its parent, so the first parent that already existed is synced as well."""
        synced: list[Path] = []

        def fsync(descriptor: int) -> None:
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            FSYNC(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        artifact = publish_small(tmp_path / "repository" / "m" / "1")
        staged = {path.name for path in synced if path.parent.name.startswith(".1.tmp-")}
        assert staged == set(names(artifact.path))
        made = tmp_path / "repository" / "m"
        assert synced[-3:] == [made, made.parent, tmp_path]  # after the rename

    @pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
    def test_an_exception_or_no_publishing_leaves_nothing_or_the_old_artifact(
        self, tmp_path: Path, error: type[BaseException] | None
    ) -> None:
        """The directories that were created for the artifact are removed, too."""
        old = publish_small(tmp_path / "1").path
        for target in (tmp_path / "r" / "m" / "1", old):
            expected = pytest.raises(error) if error else contextlib.nullcontext()
            with expected, staging(target, force=True) as staged:
                write_small(staged)
                if error:
                    raise error
        Artifact.open(old)
        assert names(tmp_path) == ["1"]

    def test_files_that_do_not_fit_the_manifest_and_what_is_no_file_are_not_published(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match="among its files"):
            publish_after(tmp_path / "1", lambda staged: (staged.path / "cpu.onnx").unlink())
        for make in (Path.mkdir, lambda path: path.symlink_to("cpu.onnx")):
            with pytest.raises(ValueError, match="regular files only"):
                publish_after(tmp_path / "1", lambda staged, make=make: make(staged.path / "more"))  # type: ignore[misc]
        assert names(tmp_path) == []


class TestTargetExists:
    @pytest.mark.parametrize("force", [False, True])
    def test_a_file_or_a_foreign_directory_is_never_replaced(self, tmp_path: Path, force: bool) -> None:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").write_text("mine")
        for target in ("file", "home"):
            with pytest.raises(ArtifactExists, match=target), staging(tmp_path / target, force=force):
                pass
        assert (tmp_path / "home" / "thesis.tex").read_text() == "mine"

    @pytest.mark.parametrize("make", [publish_small, Path.mkdir], ids=["artifact", "empty directory"])
    def test_without_force_the_target_is_rejected_and_unchanged(
        self, tmp_path: Path, make: Callable[[Path], object]
    ) -> None:
        make(tmp_path / "1")
        before = names(tmp_path / "1")
        with pytest.raises(ArtifactExists, match=r"already exists.*--force"), staging(tmp_path / "1"):
            pass
        assert names(tmp_path / "1") == before

    @pytest.mark.parametrize("fallback", [False, True])
    def test_force_replaces_it(self, tmp_path: Path, fallback: bool) -> None:
        """With and without a kernel or file system that can exchange two names; an empty directory is replaced, too."""

        def replace() -> None:
            publish_small(tmp_path / "1", force=True)
            (tmp_path / "1" / "stale").write_text("of the old one")
            publish_small(tmp_path / "1", force=True, residual=False)

        (tmp_path / "1").mkdir()
        without("renameat2", replace) if fallback else replace()
        assert Artifact.open(tmp_path / "1").manifest.tensors[0].residual is None
        assert not (tmp_path / "1" / "stale").exists()
        assert names(tmp_path) == ["1"]

    @pytest.mark.parametrize("appear", [publish_small, Path.touch], ids=["artifact", "file"])
    def test_a_target_that_appears_during_the_conversion_is_not_replaced(
        self, tmp_path: Path, appear: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Even if it appears at the last moment, after the check."""
        lexists = os.path.lexists

        def look(path: Path) -> bool:
            found = lexists(path)
            if path == tmp_path / "1":
                monkeypatch.setattr(os.path, "lexists", lexists)
                appear(path)
            return found

        def build(staged: StagingArtifact) -> None:
            monkeypatch.setattr(os.path, "lexists", look)

        with pytest.raises(ArtifactExists):
            publish_after(tmp_path / "1", build)
        assert names(tmp_path) == ["1"]

    def test_a_reader_never_misses_an_artifact_that_is_being_replaced(self, tmp_path: Path) -> None:
        """The name leads to a complete artifact before every line of the code that replaces it.

        The old and the new artifact have the same bytes.
        """
        path = publish_small(tmp_path / "1").path
        expected = {name: (path / name).read_bytes() for name in names(path)}
        looked: Counter[str] = Counter()

        def look(frame: FrameType, event: str, argument: object) -> Any:
            file = frame.f_code.co_filename
            if file != publish.__file__:
                return None
            looked[file] += 1
            assert {name: (path / name).read_bytes() for name in expected} == expected, f"at line {frame.f_lineno}"
            return look

        before = sys.gettrace()
        sys.settrace(look)
        try:
            publish_small(path, force=True)
        finally:
            sys.settrace(before)
        assert looked.keys() == {publish.__file__}


class TestKilled:
    def test_the_next_conversion_removes_what_a_killed_one_left(self, tmp_path: Path) -> None:
        with hanging_conversion(tmp_path / "1") as process:
            process.send_signal(signal.SIGKILL)
            process.wait()
        (leftover,) = names(tmp_path)
        assert leftover.startswith(f".1.tmp-{process.pid}-")
        for other in (".1.tmp", ".11.tmp-1-00000000"):  # of other versions
            (tmp_path / other).mkdir()
        publish_small(tmp_path / "1")
        assert names(tmp_path) == [".1.tmp", ".11.tmp-1-00000000", "1"]

    def test_a_running_conversion_is_not_disturbed(self, tmp_path: Path) -> None:
        """Only the lock that it holds matters, not its pid or the age of its directory."""
        with hanging_conversion(tmp_path / "1"):
            (living,) = names(tmp_path)
            publish_small(tmp_path / "1")
            assert names(tmp_path) == [living, "1"]
            assert "weights.bf16" in names(tmp_path / living)


class TestDisk:
    def test_a_limit_of_file_sizes_publishes_nothing_and_is_reported(self, tmp_path: Path) -> None:
        assert "nothing was published" in self.failure(tmp_path / "m" / "1", "1000000")
        assert names(tmp_path) == []

    def test_a_full_disk_publishes_nothing_and_is_reported(self, tmp_path: Path) -> None:
        """The test mounts a real file system of 1 MiB."""
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        try:
            message = self.failure(disk / "m" / "1")
            left = names(disk)
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        assert f"{disk}/m/1: disk full (0 MiB free), nothing was published" in message
        assert left == []

    def failure(self, target: Path, *limit: str) -> str:
        """Return what a process said that could not write its artifact."""
        with python(FILL, str(target), *limit) as process:
            _, message = process.communicate()
        assert process.returncode == 1
        assert "Traceback" not in message
        return message

    def test_a_target_that_cannot_be_written_is_rejected(self, tmp_path: Path) -> None:
        """No user, not even root, can create a directory below a file or in /proc."""
        (tmp_path / "file").touch()
        for target in (tmp_path / "file" / "1", Path("/proc/bf16kit/1")):
            with pytest.raises(UsageError, match="cannot be created"), staging(target):
                pass
