"""The manifest of an artifact: its contents, how it was made, what was measured, and the digest of every file.

``manifest.json`` is canonical JSON: keys sorted, indented by one space, UTF-8, a newline at the end, no clock time, so
the same conversion writes the same bytes. A float that is not finite is written as the string ``"inf"``, ``"-inf"`` or
``"nan"``, because JSON cannot express it. The file carries its own ``digest`` (see :mod:`bf16kit.artifact.schema`), so
that a flipped bit in the manifest is detected, as in any other file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from bf16kit.artifact import schema
from bf16kit.artifact.entries import (
    MOST_AXES,
    STRICT,
    CheckpointEntry,
    DriftEntry,
    DTypeName,
    ExportEntry,
    FileName,
    GivenEntry,
    Number,
    OracleEntry,
    OracleFigure,
    Segment,
    Sha256,
    Size,
    TensorEntry,
    check_scale,
    check_source,
    plain_name,
)
from bf16kit.artifact.schema import SCHEMA_VERSION
from bf16kit.messages.document import parse_json
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError, ManifestVersionError
from bf16kit.messages.wording import brief, quoted
from bf16kit.numerics.tensors import Kind, TensorSpec

__all__ = [
    "EXPORTS",
    "MANIFEST",
    "MEASUREMENTS",
    "PROFILES",
    "RESIDUAL",
    "SCHEMA_VERSION",
    "CheckpointEntry",
    "DriftEntry",
    "ExportEntry",
    "FileEntry",
    "GivenEntry",
    "Manifest",
    "OracleEntry",
    "OracleFigure",
    "Plan",
    "PlanEntry",
    "ProfileEntry",
    "Segment",
    "Source",
    "SpecEntry",
    "TensorEntry",
    "plain_name",
]

MANIFEST = "manifest.json"
RESIDUAL = "residual.bin"
MEASUREMENTS = "measurements.json"
PROFILES = ("cpu", "cpu-bf16", "cuda", "torchscript", "pt2")
EXPORTS = ("safetensors", "hf")
_MOST_ERRORS = 1000  # that are listed to report the first: each takes a kilobyte


class _Entry(BaseModel):
    model_config = STRICT


class SpecEntry(_Entry):
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


class ProfileEntry(_Entry):
    """One way to run the artifact, and where it was verified.

    ``verified``: ``device`` on its target device; ``host`` on the CPU; ``emulated`` by a CPU model of its rounding;
    ``no`` nowhere. ``requires`` gives the oldest version of each package that can run it, as far as known. ``golden``
    names the profile's own golden samples; None means the manifest's.
    """

    format: Literal["onnx", "torchscript", "pt2"]
    graph: FileName
    precision: str
    verified: Literal["device", "emulated", "host", "no"]
    note: str = ""
    requires: dict[str, str] = {}
    golden: FileName | None = None

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty(handler(self), "requires", "golden")


class PlanEntry(_Entry):
    """The precision of one tensor or node, and why. ``op`` is the node's operator, or the tensor's consumers'.

    ``reason`` is a sentence for users; ``code`` is the same in one word for programs, "" in artifacts older than schema
    3.
    """

    name: str
    op: str
    precision: Literal["bf16", "fp32"]
    reason: str
    code: str = ""

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty(handler(self), "code")


class Plan(_Entry):
    """The precision plan: stored tensors, and the nodes of each profile's graph."""

    tensors: list[PlanEntry] = []
    nodes: dict[str, list[PlanEntry]] = {}


class FileEntry(_Entry):
    """Digest and size of one file."""

    sha256: Sha256
    bytes: Size


class Source(_Entry):
    """The origin of the weights; ``bytes`` counts the checkpoint's tensors at their own dtypes."""

    format: str
    sha256: str
    bytes: Size
    tensors: Size


def _check_known(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in sorted(set(names) - set(known)):
        raise ValueError(f"unknown {what} {quoted(name)}; {what}s are {', '.join(known)}")


def _without_empty(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """Drop those of ``names`` that are empty in ``fields``, so that the bytes are those of older schema versions."""
    return {name: value for name, value in fields.items() if value or name not in names}


class Manifest(_Entry):
    """Everything about an artifact but its bytes. ``files`` is filled in when the artifact is published."""

    model: str
    inputs: list[SpecEntry]
    outputs: list[SpecEntry]
    batch_axis: Size | None = None
    profiles: dict[str, ProfileEntry]
    exports: dict[str, ExportEntry] = {}
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
    schema_version: int = SCHEMA_VERSION

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty(handler(self), "measurements", "oracle", "exports", "given")

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        _check_known("profile", self.profiles, PROFILES)
        _check_known("export", self.exports, EXPORTS)
        tensors = {t.name: t for t in self.tensors}
        if len(tensors) != len(self.tensors):
            raise ValueError("two tensors have the same name")
        for tensor in self.tensors:
            check_scale(tensor, tensors)
        for entry in self.checkpoint:
            check_source(entry, tensors)
        return self

    def amended(self, **changes: object) -> Manifest:
        """Return a copy with ``changes``, which are not validated."""
        return self.model_copy(update=changes)

    def golden_of(self, profile: str | None) -> str | None:
        """Return the file of the golden samples for ``profile``: its own if it has them, else the manifest's."""
        entry = None if profile is None else self.profiles.get(profile)
        return self.golden if entry is None or entry.golden is None else entry.golden

    def dumps(self) -> bytes:
        """Return the canonical bytes of ``manifest.json``."""
        return schema.dump(self.model_dump(mode="json"))

    @classmethod
    def loads(cls, data: bytes, where: str | Path) -> Manifest:
        """Parse the manifest in ``data``; ``where`` names its origin in messages.

        Raises :class:`ManifestVersionError` when it is newer than this program, :class:`ArtifactDamaged` when its bytes
        changed after they were written, :class:`ArtifactError` when it is not a manifest.
        """
        fields = _json_object(data, where)
        version = fields.get("schema_version")
        if type(version) is not int or version < 1:
            raise ArtifactError(f"{where}: schema_version is {quoted(version)}, expected 1 to {SCHEMA_VERSION}")
        if version > SCHEMA_VERSION:
            raise ManifestVersionError(
                f"{where}: schema version {version} is newer than {SCHEMA_VERSION}, the newest this bf16kit reads;"
                " upgrade bf16kit or convert the checkpoint again"
            )
        if not schema.is_intact(data):
            raise ArtifactDamaged(
                f"{where}: not the bytes that were written (its digest differs); copy or convert it again"
            )
        fields.pop(schema.FIELD, None)
        try:
            return cls.model_validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            raise ArtifactError(f"{where}: {_first_error(error)}") from None


def _json_object(data: bytes, where: str | Path) -> dict[str, Any]:
    fields = parse_json(data, ArtifactError, where)
    if not isinstance(fields, dict):
        raise ArtifactError(f"{where}: not a manifest, but a JSON {type(fields).__name__}")
    return fields


def _first_error(error: ValidationError) -> str:
    count = error.error_count()
    if count > _MOST_ERRORS:
        return f"{count} of its values are not what a manifest has; convert the checkpoint again"
    first = error.errors(include_url=False, include_input=False)[0]
    location = brief(".".join(str(part) for part in first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{location}: {message}{more}" if location else f"{message}{more}"
