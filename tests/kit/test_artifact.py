"""Opening an artifact: an intact one restores every bit; a damaged one is rejected, and the bad file is named.

And the files below it: weight files, segments, and any file that may be missing or too large.
"""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from othersfiles import unreadable, world_readable_directory
from small import CHECKPOINT, entry_of, publish_small

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import MANIFEST, CheckpointEntry, FileEntry, Manifest, Segment, Source
from bf16kit.artifact.publish import staging
from bf16kit.artifact.reading import read_bounded
from bf16kit.artifact.weightfile import WeightWriter
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError, UsageError
from bf16kit.numerics.panels import pack
from bf16kit.numerics.residual import Scale, encode_chunks
from bf16kit.numerics.rounding import BF16, to_bf16

Array = NDArray[Any]

FILES = ["cpu.onnx", "golden.safetensors", MANIFEST, "residual.bin", "weights.bf16", "weights.fp32"]


@pytest.fixture
def small_artifact(tmp_path: Path) -> Artifact:
    """Return the small artifact, published at ``tmp_path/small/1``."""
    return publish_small(tmp_path / "small" / "1")


def rewrite(artifact: Artifact, change: Callable[[Manifest], Manifest]) -> None:
    """Replace the manifest by a sealed one that is wrong on purpose, but not damaged."""
    (artifact.path / MANIFEST).write_bytes(change(artifact.manifest).dumps())


def publish_panels(target: Path, fp32: Array, bf16: Array, axis: int, scale: Array | None) -> Artifact:
    """Publish an artifact with one matrix ``w``, stored as panels. Its checkpoint holds the transpose, ``w.T``."""
    with staging(target) as staged:
        with staged.writer("weights.bf16") as file, staged.writer("residual.bin") as rest:
            at = file.append(pack(bf16, axis))
            low = rest.append_chunks(encode_chunks(fp32, bf16, None if scale is None else Scale(0, scale)))
            more = {} if scale is None else {"scale": "s", "scale_axis": 0}
            tensors = [entry_of("w", bf16, "weights.bf16", at, residual=low, panels=axis, **more)]
            if scale is not None:
                tensors.append(entry_of("s", scale, "residual.bin", rest.append(scale)))
        shape = list(fp32.T.shape)
        return staged.publish(
            Manifest(
                model="panels",
                inputs=[],
                outputs=[],
                profiles={},
                tensors=tensors,
                checkpoint=[CheckpointEntry(name="w.T", dtype="float32", shape=shape, tensor="w", permutation=[1, 0])],
                source=Source(format="test", sha256="", bytes=fp32.nbytes, tensors=1),
            )
        )


class TestReading:
    def test_the_checkpoint_is_restored_bit_for_bit(self, small_artifact: Artifact) -> None:
        """This holds for all tensors, in order: rounded, transposed, scaled, kept in fp32, or used by no graph."""
        restored = dict(Artifact.open(small_artifact.path).checkpoint_tensors())
        assert list(restored) == list(CHECKPOINT)
        for name, array in CHECKPOINT.items():
            assert restored[name].dtype == array.dtype
            assert restored[name].shape == array.shape
            assert restored[name].tobytes() == array.tobytes()

    def test_tensors_are_read_only_views_of_the_file_and_golden_samples_have_names(
        self, small_artifact: Artifact
    ) -> None:
        tensor = small_artifact.tensor("w")
        assert (tensor.dtype, tensor.shape) == (BF16, (10, 6))
        assert not tensor.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            tensor[0, 0] = 1
        golden = small_artifact.golden()
        assert np.array_equal(golden.inputs["x"], np.ones((2, 10), np.float32))
        assert list(golden.outputs) == ["y"]

    def test_without_a_residual_fp32_is_not_restored_but_the_rest_works(self, tmp_path: Path) -> None:
        artifact = publish_small(tmp_path / "1", residual=False)
        assert artifact.tensor("w").shape == (10, 6)
        with pytest.raises(ArtifactError, match="without --no-residual"):
            artifact.restore("w")
        with pytest.raises(ArtifactError, match="without --no-residual"):
            list(artifact.checkpoint_tensors())

    def test_unknown_names_are_rejected(self, small_artifact: Artifact) -> None:
        with pytest.raises(ArtifactError, match="no tensor 'nope'"):
            small_artifact.tensor("nope")
        with pytest.raises(ArtifactError, match="no file 'nope'"):
            small_artifact.file("nope")
        with pytest.raises(ArtifactError, match="int64, which was not rounded"):
            small_artifact.restore("steps")
        assert small_artifact.measurements() is None

    def test_an_artifact_may_be_moved_and_linked_to_have_other_files_and_links_within(
        self, small_artifact: Artifact, tmp_path: Path
    ) -> None:
        """In a Kubernetes volume, each file is a link into a hidden directory next to it."""
        (small_artifact.path / "serving.yaml").write_text("shadow: {}")
        moved = shutil.copytree(small_artifact.path, tmp_path / "elsewhere")
        (moved / "..data").mkdir()
        for name in FILES:
            (moved / name).rename(moved / "..data" / name)
            (moved / name).symlink_to(Path("..data", name))
        (tmp_path / "link").symlink_to(moved)
        found = Artifact.open(tmp_path / "link")
        assert [name for name, _ in found.checkpoint_tensors()] == list(CHECKPOINT)


class TestPanels:
    """A caller gets the same tensor whether or not it is stored as panels."""

    @pytest.mark.parametrize("scaled", [False, True])
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("shape", [(7, 64), (64, 7), (70, 33), (1, 1)])
    def test_tensors_are_logical_and_fp32_is_restored_bit_for_bit(
        self, shape: tuple[int, int], axis: int, scaled: bool, tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(4)
        fp32, scale = rng.standard_normal(shape, np.float32), rng.uniform(0.1, 9, shape[0]).astype(np.float32)
        stored = to_bf16((fp32.astype(np.float64) * scale[:, None]).astype(np.float32) if scaled else fp32)
        artifact = publish_panels(tmp_path / "1", fp32, stored, axis, scale if scaled else None)
        assert artifact.tensor("w").tobytes() == stored.tobytes()
        assert artifact.tensor("w").shape == shape
        assert artifact.restore("w").tobytes() == fp32.tobytes()
        assert dict(artifact.checkpoint_tensors())["w.T"].tobytes() == np.ascontiguousarray(fp32.T).tobytes()
        with pytest.raises(ValueError, match="read-only"):
            artifact.tensor("w")[0, 0] = 1


class TestDamage:
    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("place", ["first", "middle", "last"])
    def test_one_flipped_bit_is_rejected_and_the_file_is_named(
        self, small_artifact: Artifact, name: str, place: str
    ) -> None:
        path = small_artifact.path / name
        data = bytearray(path.read_bytes())
        data[{"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[place]] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match=name):
            Artifact.open(small_artifact.path)

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("missing", [False, True])
    def test_a_truncated_or_missing_file_is_rejected_even_without_hashing(
        self, small_artifact: Artifact, name: str, missing: bool
    ) -> None:
        path = small_artifact.path / name
        path.unlink() if missing else path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ArtifactError, match=name if missing else f"{name}: .*; copy or convert"):
            Artifact.open(small_artifact.path, verify=False)

    @pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
    def test_what_is_no_file_is_rejected_without_waiting_for_it(
        self, small_artifact: Artifact, make: Callable[[Path], None]
    ) -> None:
        (small_artifact.path / "cpu.onnx").unlink()
        make(small_artifact.path / "cpu.onnx")
        with pytest.raises(ArtifactError, match=r"cpu\.onnx: not a regular file"):
            Artifact.open(small_artifact.path)

    @pytest.mark.parametrize("name", FILES)
    def test_a_link_out_of_the_artifact_is_rejected(self, small_artifact: Artifact, name: str, tmp_path: Path) -> None:
        """Even a link to the same bytes is rejected."""
        (small_artifact.path / name).rename(tmp_path / name)
        (small_artifact.path / name).symlink_to(tmp_path / name)
        with pytest.raises(ArtifactError, match=f"{name}: a link out of {small_artifact.path}; put the file"):
            Artifact.open(small_artifact.path)


class TestRejected:
    def test_what_is_no_artifact(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for name, message in (("nope", "no such directory"), ("file", "not a directory"), ("", "it has no manifest")):
            with pytest.raises(ArtifactError, match=message):
                Artifact.open(tmp_path / name)

    @pytest.mark.parametrize("name", ["cpu.onnx", "golden.safetensors", "residual.bin", "weights.bf16", "own"])
    def test_a_file_that_is_used_but_not_listed(self, small_artifact: Artifact, name: str) -> None:
        """A file is read only if its digest is known; ``own`` are the golden samples of a profile."""
        own = small_artifact.manifest.profiles["cpu"].model_copy(update={"golden": "own" if name == "own" else None})
        files = {k: v for k, v in small_artifact.manifest.files.items() if k != name}
        rewrite(small_artifact, lambda m: m.amended(files=files, profiles={"cpu": own}))
        with pytest.raises(ArtifactError, match=f"'{name}'.*not among its files"):
            Artifact.open(small_artifact.path)

    @pytest.mark.parametrize("part", ["tensor", "residual"])
    def test_a_tensor_that_ends_beyond_its_file(self, small_artifact: Artifact, part: str) -> None:
        first, *rest = small_artifact.manifest.tensors
        assert first.residual is not None
        far = {"offset": 1 << 40}
        changes = far if part == "tensor" else {"residual": first.residual.model_copy(update=far)}
        rewrite(small_artifact, lambda m: m.amended(tensors=[first.model_copy(update=changes), *rest]))
        with pytest.raises(ArtifactError, match=r"tensor 'w' ends at byte .* beyond the end"):
            Artifact.open(small_artifact.path)

    def test_golden_samples_that_are_absent_no_safetensors_or_of_more_axes_than_numpy_has(
        self, small_artifact: Artifact
    ) -> None:
        text = json.dumps({"input:x": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}).encode()
        data = struct.pack("<Q", len(text)) + text + bytes(4)
        (small_artifact.path / "deep").write_bytes(data)
        entry = FileEntry(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        manifest = small_artifact.manifest
        for golden, message in ((None, "no golden samples"), ("cpu.onnx", r"cpu\.onnx: "), ("deep", "deep: maximum")):
            changed = manifest.amended(golden=golden, files={**manifest.files, "deep": entry})
            (small_artifact.path / MANIFEST).write_bytes(changed.dumps())
            with pytest.raises(ArtifactError, match=message):
                Artifact.open(small_artifact.path).golden()


def test_an_artifact_opened_with_copies_maps_nothing(tmp_path: Path) -> None:
    """Its files may be truncated at any moment, which would kill a process that has mapped them."""
    opened = Artifact.open(publish_small(tmp_path / "m" / "1").path, copies=True)
    tensor = opened.tensor("w")
    assert str(opened.path) not in Path("/proc/self/maps").read_text()
    np.testing.assert_array_equal(tensor, Artifact.open(opened.path).tensor("w"))
    for name, array in opened.checkpoint_tensors():
        np.testing.assert_array_equal(array, CHECKPOINT[name])
    os.truncate(opened.path / "weights.bf16", 8)
    with pytest.raises(ArtifactDamaged, match=r"weights\.bf16"):
        opened.tensor("w")


def test_verifying_again_reads_only_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Artifact.open(publish_small(tmp_path / "m" / "1").path)
    monkeypatch.setattr("hashlib.file_digest", lambda file, _: pytest.fail(f"{file.name} was read again"))
    opened.verify()
    monkeypatch.undo()
    with (opened.path / "weights.fp32").open("r+b") as file:
        file.write(b"\x55")
    with pytest.raises(ArtifactDamaged, match=r"weights\.fp32"):
        opened.verify()


def test_a_file_removed_after_the_opening_is_named_in_the_error(tmp_path: Path) -> None:
    opened = Artifact.open(publish_small(tmp_path / "m" / "1").path, verify=False)
    (opened.path / "residual.bin").unlink()
    with pytest.raises(ArtifactDamaged, match=r"residual\.bin"):
        opened.verify()
    (opened.path / "golden.safetensors").unlink()
    with pytest.raises(ArtifactDamaged, match=r"golden\.safetensors"):
        opened.golden()


def test_each_tensor_starts_at_a_multiple_of_64_with_zeros_between(tmp_path: Path) -> None:
    with WeightWriter(tmp_path / "w") as writer:
        assert writer.append(np.array([1, 2], np.uint8)) == Segment(offset=0, bytes=2)
        assert writer.append(np.array([3], np.uint8)) == Segment(offset=64, bytes=1)
    assert (tmp_path / "w").read_bytes() == b"\1\2" + bytes(62) + b"\3"


@pytest.mark.parametrize(
    "array",
    [
        np.array(1.5, BF16),
        np.zeros((0, 3), np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(3, dtype=">i8"),
        np.array([True, False]),
        np.ones(3 << 18, np.float64),  # more than one piece
    ],
    ids=["scalar", "empty", "transposed", "big-endian", "bool", "large"],
)
def test_any_array_is_written_little_endian_in_c_order(tmp_path: Path, array: NDArray[Any]) -> None:
    with WeightWriter(tmp_path / "w") as writer:
        writer.append(array)
    data = np.frombuffer((tmp_path / "w").read_bytes(), array.dtype.newbyteorder("<"))
    assert np.array_equal(data.reshape(array.shape), array)


@pytest.mark.parametrize("endless", [False, True])
def test_a_file_over_the_limit_or_absent_is_rejected_and_the_reason_is_named(tmp_path: Path, endless: bool) -> None:
    path = Path("/dev/zero") if endless else tmp_path / "rules.yaml"
    if not endless:
        path.write_bytes(bytes(1 << 20))
        assert read_bounded(path, 1 << 20, UsageError, "") == bytes(1 << 20)
        path.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(UsageError, match=f"--map {path}: larger than 1 MiB, of which nobody has so many"):
        read_bounded(path, 1 << 20, UsageError, "of which nobody has so many", where=f"--map {path}")
    with pytest.raises(UsageError, match=r"absent\.yaml: cannot be read: No such file or directory"):
        read_bounded(tmp_path / "absent.yaml", 1, UsageError, "")


@pytest.mark.parametrize("what", [".", "manifest.json", "weights.bf16"])
def test_the_error_for_an_artifact_without_read_permission_names_the_user(tmp_path: Path, what: str) -> None:
    """This happens on a volume that root filled. The error says which user needs access, without a traceback."""
    published = publish_small(tmp_path / "a" / "1").path
    with world_readable_directory() as place:
        artifact = shutil.copytree(published, place / "1")
        with unreadable(artifact / what) as user, pytest.raises(ArtifactDamaged) as refusal:
            Artifact.open(artifact)
    assert f"cannot be read: Permission denied to user {user}" in str(refusal.value)
