"""The manifest of an artifact: its contents, how it was made, what was measured, and the digest of every file.

``manifest.json`` is canonical JSON without a clock time, so the same conversion writes the same bytes. It carries its
own ``digest``, computed with its own 64 digits as zeros, so that a flipped bit in the manifest is detected, as in any
other file.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from bf16kit.artifact.entries import (
    MOST_AXES,
    DTypeName,
    Entry,
    FileName,
    GivenEntry,
    Number,
    Sha256,
    Size,
    canonical,
    first_error,
)
from bf16kit.artifact.entries import CheckpointEntry as CheckpointEntry
from bf16kit.artifact.entries import DriftEntry as DriftEntry
from bf16kit.artifact.entries import Segment as Segment
from bf16kit.artifact.entries import TensorEntry as TensorEntry
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError, ManifestVersionError
from bf16kit.messages.wording import parse_json, quoted
from bf16kit.numerics.tensors import Kind, TensorSpec

# What each version added: 2 panels; 3 the oracle, measurements, requirements, reason codes and bounds of quantiles;
# 4 profile cpu-bf16 and golden samples of a profile's own; 5 exports and profiles of format pt2; 6 files that were
# given beside the checkpoint; 7 slice errors, and top1_agreement judged at its measured value.
SCHEMA_VERSION = 8  # the newest, which is written; all of them are read
SINCE_SLICES = 7

MANIFEST = "manifest.json"
RESIDUAL = "residual.bin"
MEASUREMENTS = "measurements.json"
PROFILES = ("cpu", "cpu-bf16", "cuda", "torchscript", "pt2")
_DIGEST = re.compile(rb'^ "digest": "([0-9a-f]{64})",?$', re.MULTILINE)  # one space of indentation: the top level
_ZEROS = b"0" * 64
# Values, counted by the commas and opening brackets, which takes no memory. Parsing them stops all threads for half a
# second. A manifest of 35 MiB, with 10,000 tensors and 40,000 nodes in each of three profiles' plans, has 1,100,000.
_MOST_VALUES = 3_000_000


class ExportEntry(Entry):
    """The same weights as plain ``files`` for other programs; this project does not serve them.

    Drift is measured by running the widened tensors in the fp32 reference: ``verified`` is then ``host``.
    """

    files: Annotated[list[FileName], Field(min_length=1)]
    precision: str
    verified: Literal["host", "no"]
    note: str = ""


class OracleFigure(Entry):
    """The fp32 reference's distance from the source framework in one output, and the bound on ``relative_l2``."""

    relative_l2: Number
    max_abs: Number
    bound: Number


class OracleEntry(Entry):
    """Whether the fp32 reference was checked against the source framework's own outputs, before any rounding.

    ``how`` names the program that computed them for ``feeds`` samples, or the reason why none could.
    """

    checked: bool
    how: str
    feeds: Size = 0
    outputs: dict[str, OracleFigure] = {}


class SpecEntry(Entry):
    """An input or output: see :class:`bf16kit.numerics.tensors.TensorSpec`."""

    name: str
    dtype: DTypeName
    shape: Annotated[list[int | str], Field(max_length=MOST_AXES)]
    kind: Kind = "other"

    @classmethod
    def of(cls, spec: TensorSpec) -> SpecEntry:
        return cls(name=spec.name, dtype=spec.dtype, shape=list(spec.shape), kind=spec.kind)

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, tuple(self.shape), self.kind)


class ProfileEntry(Entry):
    """One way to run the artifact, and where it was verified.

    ``verified``: ``device`` on its target device; ``host`` on the CPU; ``emulated`` by a CPU model of its rounding;
    ``no`` nowhere. ``requires`` gives the oldest version of each package that can run it, as far as known. ``golden``
    names the profile's own golden samples; None means the manifest's.
    """

    omitted = ("requires", "golden")

    format: Literal["onnx", "torchscript", "pt2"]
    graph: FileName
    precision: str
    verified: Literal["device", "emulated", "host", "no"]
    note: str = ""
    requires: dict[str, str] = {}
    golden: FileName | None = None


class PlanEntry(Entry):
    """The precision of one tensor or node, and why. ``op`` is the node's operator, or the tensor's consumers'.

    ``reason`` is a sentence for users; ``code`` is the same in one word for programs, "" before schema version 3.
    """

    omitted = ("code",)

    name: str
    op: str
    precision: Literal["bf16", "fp32"]
    reason: str
    code: str = ""


class Plan(Entry):
    """The precision plan: stored tensors, and the nodes of each profile's graph."""

    tensors: list[PlanEntry] = []
    nodes: dict[str, list[PlanEntry]] = {}


class FileEntry(Entry):
    """Digest and size of one file."""

    sha256: Sha256
    bytes: Size


class Source(Entry):
    """The origin of the weights; ``bytes`` counts the checkpoint's tensors at their own dtypes."""

    format: str
    sha256: str
    bytes: Size
    tensors: Size


class Manifest(Entry):
    """Everything about an artifact but its bytes. ``files`` is filled in when the artifact is published."""

    omitted = ("measurements", "oracle", "exports", "given", "requires")

    model: str
    inputs: list[SpecEntry]
    outputs: list[SpecEntry]
    batch_axis: Size | None = None
    profiles: dict[Annotated[str, Field(pattern=f"^({'|'.join(PROFILES)})$")], ProfileEntry]
    exports: dict[Annotated[str, Field(pattern="^(safetensors|hf)$")], ExportEntry] = {}
    reference: FileName | None = None
    golden: FileName | None = None
    measurements: FileName | None = None
    oracle: OracleEntry | None = None
    tensors: list[TensorEntry] = []
    checkpoint: list[CheckpointEntry] = []
    plan: Plan = Plan()
    budget: dict[str, Number] = {}
    drift: dict[str, DriftEntry] = {}
    files: dict[FileName, FileEntry] = {}
    source: Source
    given: list[GivenEntry] = []
    tools: dict[str, str] = {}
    seed: int = 0
    options: dict[str, JsonValue] = {}
    requires: dict[str, str] = {}  # of every profile: where the first writers of version 3 had it
    schema_version: int = SCHEMA_VERSION

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if self.requires and (self.schema_version != 3 or any(entry.requires for entry in self.profiles.values())):
            raise ValueError("requires beside profiles: only the first writers of version 3 had it there")
        tensors = {t.name: t for t in self.tensors}
        if len(tensors) != len(self.tensors):
            raise ValueError("two tensors have the same name")
        for tensor in self.tensors:
            if tensor.scale is None or tensor.scale_axis is None:
                continue
            scale, size = tensors.get(tensor.scale), tensor.shape[tensor.scale_axis]
            if scale is None or scale.dtype != "float32" or scale.shape != [size]:
                what = f"tensor {quoted(tensor.name)}: its scale {quoted(tensor.scale)}"
                raise ValueError(f"{what} is not a stored float32 tensor of {size} values")
        for entry in self.checkpoint:
            entry.check(tensors)
        return self

    def amended(self, **changes: object) -> Manifest:
        """Return a copy with ``changes``, which are not validated."""
        return self.model_copy(update=changes)

    def golden_of(self, profile: str | None) -> str | None:
        """Return the file of the golden samples for ``profile``: its own if it has them, else the manifest's."""
        entry = self.profiles.get(profile or "")
        return self.golden if entry is None or entry.golden is None else entry.golden

    def dumps(self) -> bytes:
        """Return the canonical bytes of ``manifest.json``, with their digest."""
        return sealed(self.model_dump(mode="json"))

    @classmethod
    def loads(cls, data: bytes, where: str | Path) -> Manifest:
        """Parse the manifest in ``data``; errors begin with ``where``.

        Raises :class:`ManifestVersionError` when it is newer than this program, :class:`ArtifactDamaged` when its bytes
        changed after they were written, :class:`ArtifactError` when it is not a manifest.
        """
        if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            raise ArtifactError(f"{where}: more than {_MOST_VALUES:,} values, not a manifest")
        fields = parse_json(data, ArtifactError, where)
        if not isinstance(fields, dict):
            raise ArtifactError(f"{where}: not a manifest, but a JSON {type(fields).__name__}")
        version = fields.get("schema_version")
        if type(version) is not int or version < 1:
            raise ArtifactError(f"{where}: schema_version is {quoted(version)}, expected 1 to {SCHEMA_VERSION}")
        if version > SCHEMA_VERSION:
            raise ManifestVersionError(
                f"{where}: schema version {version} is newer than {SCHEMA_VERSION}, the newest this bf16kit reads;"
                " upgrade bf16kit or convert the checkpoint again"
            )
        digest = _DIGEST.search(data)
        if digest is None or hashlib.sha256(_with_digest(data, _ZEROS)).hexdigest().encode() != digest[1]:
            raise ArtifactDamaged(
                f"{where}: not the bytes that were written (its digest differs); copy or convert it again"
            )
        fields.pop("digest", None)  # the line found may lie deeper; then the schema rejects the key around it
        try:
            found = cls.model_validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            raise ArtifactError(f"{where}: {first_error(error)}") from None
        if not found.requires:
            return found
        profiles = {p: entry.model_copy(update={"requires": found.requires}) for p, entry in found.profiles.items()}
        return found.amended(profiles=profiles, requires={})


def sealed(fields: dict[str, Any]) -> bytes:
    """Return the canonical JSON of ``fields`` with its ``digest``."""
    data = canonical(fields | {"digest": _ZEROS.decode()})
    return _with_digest(data, hashlib.sha256(data).hexdigest().encode())


def _with_digest(data: bytes, digest: bytes) -> bytes:
    return _DIGEST.sub(lambda line: line[0].replace(line[1], digest), data, count=1)
