"""The manifest: canonical bytes, and a clear message for each error in it."""

import hashlib
import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bf16kit.artifact.entries import CheckpointEntry, DriftEntry, Segment, TensorEntry
from bf16kit.artifact.manifest import FileEntry, Manifest, Plan, PlanEntry, ProfileEntry, Source, SpecEntry, sealed
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError, ManifestVersionError

EMPTY = hashlib.sha256().hexdigest()
ZEROS = b"0" * 64
MISPLACED = b'{"schema_version": 1, "x": {\n "digest": "' + ZEROS + b'"\n}}'  # the place of the right digest is wrong
MATRIX = TensorEntry(
    name="w", dtype="bfloat16", shape=[2, 3], file="weights.bf16", offset=64, bytes=12,
    residual=Segment(offset=0, bytes=44),
)  # fmt: skip
SCALE = TensorEntry(name="s", dtype="float32", shape=[2], file="weights.fp32", offset=0, bytes=8)
CPU = ProfileEntry(format="onnx", graph="cpu.onnx", precision="bf16-weights", verified="host")
NOT_PLAIN = ["", ".", "..", "a/b", "/a", "a\\b", "a\0", "a\n", "../golden"]
_EXPORT: dict[str, Any] = {"files": ["model.safetensors"], "precision": "bf16-weights", "verified": "host"}
_GIVEN: dict[str, Any] = {"option": "--map", "name": "rules.yaml", "sha256": "1" * 64, "bytes": 3}


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "model": "tiny",
        "inputs": [SpecEntry(name="x", dtype="int64", shape=["batch", 3])],
        "outputs": [SpecEntry(name="ŷ", dtype="float32", shape=["batch", 2], kind="logits")],
        "batch_axis": 0,
        "profiles": {"cpu": CPU},
        "tensors": [MATRIX],
        "checkpoint": [
            CheckpointEntry(name="lin.weight", dtype="float32", shape=[3, 2], tensor="w", permutation=[1, 0])
        ],
        "plan": Plan(tensors=[PlanEntry(name="w", op="MatMul", precision="bf16", reason="matrix")]),
        "budget": {"relative_l2": 1.5e-2},
        "drift": {"cpu": DriftEntry(samples=1, source="random", outputs={"ŷ": {"sqnr_db": {"mean": math.inf}}})},
        "files": {"cpu.onnx": FileEntry(sha256=EMPTY, bytes=0)},
        "source": Source(format="safetensors", sha256=EMPTY, bytes=24, tensors=1),
        "options": {"keep_fp32": ["a.*"], "search": False, "none": None},
    }
    return Manifest(**(fields | changes))


def fields_of(data: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(data)
    return fields


class TestBytes:
    def test_a_manifest_is_canonical_and_read_as_it_was_written(self) -> None:
        """Keys are sorted, indents are one space, the text is UTF-8 and ends with a newline. Rewriting keeps it."""
        data = manifest().dumps()
        assert Manifest.loads(data, "manifest.json") == manifest()
        assert data == Manifest.loads(data, "").dumps()
        assert data == (json.dumps(json.loads(data), sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()
        assert "ŷ".encode() in data
        # JSON has no infinity, and other readers could not parse one
        assert fields_of(data)["drift"]["cpu"]["outputs"]["ŷ"]["sqnr_db"]["mean"] == "inf"

    def test_the_digest_is_of_the_bytes_with_zeros_in_its_place(self) -> None:
        data = manifest().dumps()
        digest = fields_of(data)["digest"].encode()
        assert hashlib.sha256(data.replace(digest, b"0" * 64)).hexdigest().encode() == digest


class TestRejected:
    def test_a_flipped_bit_in_any_byte(self) -> None:
        """Any makes the file invalid, and the error names the file."""
        data = manifest().dumps()
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            with pytest.raises(ArtifactError, match=r"^/repo/m/1/manifest\.json: "):
                Manifest.loads(bytes(flipped), "/repo/m/1/manifest.json")

    @given(st.binary(max_size=64))
    def test_junk(self, junk: bytes) -> None:
        with pytest.raises(ArtifactError, match=r"^manifest\.json: "):
            Manifest.loads(junk, "manifest.json")

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "not JSON"),
            (b"\xff\xfe", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b"[]", "a JSON list"),
            (b"{}", "schema_version is None"),
            (b'{"schema_version": true}', "schema_version is True"),
            (b'{"schema_version": 0}', "schema_version is 0, expected 1 to 8"),
            (b'{"schema_version": 1}', "its digest differs"),
            (MISPLACED.replace(ZEROS, hashlib.sha256(MISPLACED).hexdigest().encode()), "Field required"),
        ],
    )
    def test_a_file_that_is_not_a_manifest(self, data: bytes, message: str) -> None:
        with pytest.raises(ArtifactError, match=message):
            Manifest.loads(data, "manifest.json")

    def test_a_newer_schema_with_any_content_and_an_edited_budget(self) -> None:
        with pytest.raises(ManifestVersionError):
            Manifest.loads(b'{"schema_version": 9, "novelty": []}', "manifest.json")
        with pytest.raises(ArtifactDamaged, match="its digest differs"):
            Manifest.loads(manifest().dumps().replace(b"0.015", b"0.150"), "manifest.json")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"novelty": 1}, "novelty: Extra inputs are not permitted"),
            ({"model": None}, "model: Input should be a valid string"),
            ({"seed": "1"}, "seed: Input should be a valid integer"),
            ({"model": 1, "seed": "x"}, r"\(and 1 more\)"),
            ({"source": {"format": "x"}}, r"source\.sha256: Field required"),
            ({"requires": {"onnxruntime-gpu": "1.23.0"}}, "only the first writers of version 3"),
            *(({"golden": name}, "golden: .* is not a plain file name") for name in NOT_PLAIN),
            ({"files": {"/etc/passwd": {"sha256": EMPTY, "bytes": 0}}}, "'/etc/passwd' is not a plain file name"),
            ({"files": {"a": {"sha256": "short", "bytes": 0}}}, r"files\.a\.sha256"),
            ({"files": {"a": {"sha256": EMPTY, "bytes": -1}}}, r"files\.a\.bytes"),
            ({"exports": {"gguf": _EXPORT}}, r"exports\.gguf\..*should match pattern '\^\(safetensors\|hf\)\$'"),
            ({"exports": {"hf": _EXPORT | {"files": ["../config.json"]}}}, "is not a plain file name"),
            ({"exports": {"hf": _EXPORT | {"files": []}}}, "at least 1 item"),
            ({"given": [_GIVEN | {"name": "../rules.yaml"}]}, r"given\.0\.name"),
            ({"given": [_GIVEN | {"option": "--out"}]}, r"given\.0\.option"),
            (
                {"profiles": {"tpu": {"format": "onnx", "graph": "g", "precision": "", "verified": "no"}}},
                r"profiles\.tpu\.",
            ),
        ],
    )
    def test_wrong_fields_are_named(self, changes: dict[str, Any], message: str) -> None:
        fields = fields_of(manifest().dumps()) | changes
        with pytest.raises(ArtifactError, match=message):
            Manifest.loads(sealed(fields), "manifest.json")


def test_what_a_manifest_of_version_3_requires_is_required_by_each_of_its_profiles() -> None:
    needed = {"onnxruntime-gpu": "1.23.0"}
    fields = fields_of(manifest().dumps()) | {"schema_version": 3, "requires": needed}
    found = Manifest.loads(sealed(fields), "manifest.json")
    assert (found.profiles["cpu"].requires, found.requires) == (needed, {})


class TestConsistency:
    """The fields of a manifest must fit together before any file is read."""

    def test_tensor_names_are_unique_and_a_scale_is_a_stored_tensor_of_fitting_size(self) -> None:
        with pytest.raises(ValidationError, match="same name"):
            manifest(tensors=[MATRIX, MATRIX])
        scaled = MATRIX.model_copy(update={"scale": "s", "scale_axis": 0})
        assert manifest(tensors=[scaled, SCALE]).tensors[0].scale == "s"
        with pytest.raises(ValidationError, match="float32 tensor of 3 values"):
            manifest(tensors=[scaled.model_copy(update={"scale_axis": 1}), SCALE])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tensor": "v"}, "no stored tensor 'v'"),
            ({"permutation": None}, r"\[3, 2\] is not \[2, 3\] permuted by None"),
            ({"permutation": [0, 0]}, "permuted"),
            ({"permutation": [1, 2]}, "permuted"),
            ({"dtype": "float64"}, "bfloat16 does not restore float64"),
        ],
    )
    def test_a_checkpoint_tensor_comes_from_a_stored_one(self, changes: dict[str, Any], message: str) -> None:
        fields = {"name": "w", "dtype": "float32", "shape": [3, 2], "tensor": "w", "permutation": [1, 0]} | changes
        with pytest.raises(ValidationError, match=message):
            manifest(checkpoint=[CheckpointEntry(**fields)])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("tensors", "[" + "0," * 200_000 + "0]", "200001 of its values are not valid; convert"),
        ("options", '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "not JSON"),
        ("options", '{"a": [' + "[]," * 1_500_000 + "0]}", "more than 3,000,000 values, not a manifest"),
        ("options", '{"a": [' + ("[" * 900 + "]" * 900 + ",") * 3_333 + "0]}", "more than 3,000,000 values"),
        ("options", '{"a": [' + '{"":{}},' * 1_000_000 + "0]}", "more than 3,000,000 values"),
    ],
    ids=["wrong values", "depth", "lists", "lists within lists", "objects"],
)
def test_a_manifest_made_to_take_memory_or_time_is_rejected_in_a_line(place: str, value: str, message: str) -> None:
    """Python parses JSON in one step for which all threads of a server wait, health checks included."""
    text = json.dumps(fields_of(manifest().dumps()) | {place: "@", "digest": "0" * 64}, sort_keys=True, indent=1)
    data = text.replace('"@"', value).encode() + b"\n"
    data = data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)
    start = time.process_time()
    with pytest.raises(ArtifactError, match=message) as refusal:
        Manifest.loads(data, "manifest.json")
    assert time.process_time() - start < 5
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes": 13}, "13 bytes do not hold bfloat16"),
        ({"scale_axis": 9}, "scale None on axis 9 does not fit"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'"),
        ({"dtype": "string", "bytes": 48}, "do not hold string"),
        ({"shape": [2, -3]}, "greater than or equal to 0"),
        ({"shape": [1] * 65}, "at most 64 items"),
        ({"shape": [2**62] * 64}, r"bytes do not hold bfloat16\["),
        ({"shape": [2**63]}, "less than or equal"),
        ({"scale": "s"}, "scale 's' on axis None does not fit"),
        ({"scale": "s", "scale_axis": 2}, "scale 's' on axis 2 does not fit"),
        ({"panels": 2}, r"'w': panels 2 lie along axis 0 or 1 of a bfloat16 matrix, or 0 .* not of bfloat16\[2, 3\]"),
        ({"panels": -1}, "panels -1 lie along"),
        ({"panels": 0, "shape": [6]}, r"not of bfloat16\[6\]"),
        ({"panels": 1, "shape": [1, 2, 3]}, r"not of bfloat16\[1, 2, 3\]"),
        ({"panels": 1, "dtype": "float16"}, r"not of float16\[2, 3\]"),
        ({"panels": 1.5}, "valid integer"),
    ],
)
def test_fields_of_a_tensor_that_do_not_fit_together_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TensorEntry(**(MATRIX.model_dump() | changes))
