"""The manifest of an artifact: what it holds, how it was made, what it measured, and the digest of every file.

``manifest.json`` is canonical JSON: keys sorted, indented by one space, UTF-8, a newline at the end, no clock time, so
the same conversion writes the same bytes. A float that is not finite is written as the string ``"inf"``, ``"-inf"`` or
``"nan"``, because JSON has no word for it. The file carries its own ``digest`` (see :mod:`bf16kit.seal`), so that a
flipped bit in the manifest is seen like one in any other file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from bf16kit import seal
from bf16kit.errors import ArtifactDamaged, ArtifactError, ManifestVersionError
from bf16kit.tensors import BY_NAME, Kind, TensorSpec

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
RESIDUAL = "residual.bin"
PROFILES = ("cpu", "cuda", "torchscript")


def plain_name(name: str) -> str:
    """``name`` when it is a plain file name; ValueError for a path, ``.``, ``..``, or control characters in it."""
    if name in ("", ".", "..") or any(c in "/\\" or ord(c) < 32 for c in name):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def _known_dtype(dtype: str) -> str:
    if dtype not in BY_NAME:
        raise ValueError(f"unknown dtype {dtype!r}")
    return dtype


def _read_number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _write_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


FileName = Annotated[str, AfterValidator(plain_name)]
DTypeName = Annotated[str, AfterValidator(_known_dtype)]
Size = Annotated[int, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_read_number), PlainSerializer(_write_number, when_used="json")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Segment(_Entry):
    """A run of bytes in a file."""

    offset: Size
    bytes: Size


class TensorEntry(_Entry):
    """One stored tensor: little-endian, C order, at ``offset`` of ``file``.

    A bfloat16 tensor has a ``residual`` segment in residual.bin unless the residual was left out. ``scale`` names the
    1-D float32 tensor (one value per index of ``scale_axis``) that was folded into this one before rounding.
    """

    name: str
    dtype: DTypeName
    shape: list[Size]
    file: FileName
    offset: Size
    bytes: Size
    residual: Segment | None = None
    scale: str | None = None
    scale_axis: Size | None = None

    @model_validator(mode="after")
    def _consistent(self) -> TensorEntry:
        expected = BY_NAME[self.dtype].numpy.itemsize * math.prod(self.shape)
        if self.dtype == "string" or self.bytes != expected:
            raise ValueError(f"tensor {self.name!r}: {self.bytes} bytes do not hold {self.dtype}{self.shape}")
        if (self.scale is None) != (self.scale_axis is None):
            raise ValueError(f"tensor {self.name!r}: scale and scale_axis belong together")
        if self.scale_axis is not None and self.scale_axis >= len(self.shape):
            raise ValueError(f"tensor {self.name!r}: scale_axis {self.scale_axis} is not an axis of {self.shape}")
        return self


class CheckpointEntry(_Entry):
    """One tensor of the source checkpoint: stored tensor ``tensor``, restored, its axes permuted by ``permutation``."""

    name: str
    dtype: DTypeName
    shape: list[Size]
    tensor: str
    permutation: list[Size] | None = None


class SpecEntry(_Entry):
    """An input or output: see :class:`bf16kit.tensors.TensorSpec`."""

    name: str
    dtype: DTypeName
    shape: list[int | str]
    kind: Kind = "other"

    @classmethod
    def of(cls, spec: TensorSpec) -> SpecEntry:
        return cls(name=spec.name, dtype=spec.dtype, shape=list(spec.shape), kind=spec.kind)

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, tuple(self.shape), self.kind)


class ProfileEntry(_Entry):
    """One way to run the artifact, and where that was verified.

    ``verified``: ``device`` on the device it is for; ``host`` on the CPU; ``emulated`` by a CPU model of its rounding.
    """

    format: Literal["onnx", "torchscript"]
    graph: FileName
    precision: str
    verified: Literal["device", "emulated", "host", "no"]
    note: str = ""


class PlanEntry(_Entry):
    """What became of one tensor or node, and why. ``op`` is the node's operator, or the tensor's consumers'."""

    name: str
    op: str
    precision: Literal["bf16", "fp32"]
    reason: str


class Plan(_Entry):
    """The precision plan: stored tensors, and the nodes of each profile's graph."""

    tensors: list[PlanEntry] = []
    nodes: dict[str, list[PlanEntry]] = {}


class DriftEntry(_Entry):
    """Drift measured at conversion: ``outputs[output][metric][stat]``, from ``bf16kit.drift.DriftSummary.as_dict``."""

    samples: int
    source: str
    outputs: dict[str, dict[str, dict[str, Number]]]
    emulated: bool = False


class FileEntry(_Entry):
    """Digest and size of one file."""

    sha256: Sha256
    bytes: Size


class Source(_Entry):
    """Where the weights came from: ``bytes`` counts the checkpoint's tensors at their own dtypes."""

    format: str
    sha256: str
    bytes: Size
    tensors: Size


class Manifest(_Entry):
    """Everything about an artifact but its bytes. ``files`` is filled in when the artifact is published."""

    schema_version: int = SCHEMA_VERSION
    model: str
    inputs: list[SpecEntry]
    outputs: list[SpecEntry]
    batch_axis: int | None = None
    profiles: dict[str, ProfileEntry]
    reference: FileName | None = None
    golden: FileName | None = None
    tensors: list[TensorEntry] = []
    checkpoint: list[CheckpointEntry] = []
    plan: Plan = Plan()
    budget: dict[str, Number] = {}
    drift: dict[str, DriftEntry] = {}
    files: dict[FileName, FileEntry] = {}
    source: Source
    tools: dict[str, str] = {}
    seed: int = 0
    options: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        unknown = sorted(self.profiles.keys() - set(PROFILES))
        if unknown:
            raise ValueError(f"unknown profile {unknown[0]!r}; profiles are {', '.join(PROFILES)}")
        tensors = {t.name: t for t in self.tensors}
        if len(tensors) != len(self.tensors):
            raise ValueError("two tensors have the same name")
        for tensor in self.tensors:
            _check_scale(tensor, tensors)
        for entry in self.checkpoint:
            _check_source(entry, tensors)
        return self

    def dumps(self) -> bytes:
        """The canonical bytes of ``manifest.json``."""
        return seal.dump(self.model_dump(mode="json"))

    @classmethod
    def loads(cls, data: bytes, where: str | Path) -> Manifest:
        """The manifest in ``data``, read from ``where`` (for messages).

        Raises :class:`ManifestVersionError` when it is newer than this program, :class:`ArtifactDamaged` when its bytes
        changed after they were written, :class:`ArtifactError` when it is not a manifest.
        """
        fields = _json_object(data, where)
        version = fields.get("schema_version")
        if type(version) is not int or version < 1:
            raise ArtifactError(f"{where}: schema_version is {version!r}, expected {SCHEMA_VERSION}")
        if version > SCHEMA_VERSION:
            raise ManifestVersionError(
                f"{where}: schema version {version} is newer than {SCHEMA_VERSION}, the newest this bf16kit reads;"
                " upgrade bf16kit or convert the checkpoint again"
            )
        if not seal.is_intact(data):
            raise ArtifactDamaged(
                f"{where}: not the bytes that were written (its digest differs); copy or convert it again"
            )
        fields.pop(seal.FIELD, None)
        try:
            return cls.model_validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            raise ArtifactError(f"{where}: {_first_error(error)}") from None


def _check_scale(tensor: TensorEntry, tensors: dict[str, TensorEntry]) -> None:
    if tensor.scale is None or tensor.scale_axis is None:
        return
    scale = tensors.get(tensor.scale)
    if scale is None or scale.dtype != "float32" or scale.shape != [tensor.shape[tensor.scale_axis]]:
        raise ValueError(
            f"tensor {tensor.name!r}: its scale {tensor.scale!r} is not a stored float32 tensor of"
            f" {tensor.shape[tensor.scale_axis]} values"
        )


def _check_source(entry: CheckpointEntry, tensors: dict[str, TensorEntry]) -> None:
    tensor = tensors.get(entry.tensor)
    if tensor is None:
        raise ValueError(f"checkpoint tensor {entry.name!r}: no stored tensor {entry.tensor!r}")
    order = list(range(len(tensor.shape))) if entry.permutation is None else entry.permutation
    if sorted(order) != list(range(len(tensor.shape))) or [tensor.shape[i] for i in order] != entry.shape:
        raise ValueError(
            f"checkpoint tensor {entry.name!r}: {entry.shape} is not {tensor.shape} permuted by {entry.permutation}"
        )
    if entry.dtype != tensor.dtype and (entry.dtype, tensor.dtype) != ("float32", "bfloat16"):
        raise ValueError(f"checkpoint tensor {entry.name!r}: {tensor.dtype} does not restore {entry.dtype}")


def _json_object(data: bytes, where: str | Path) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ArtifactError(f"{where}: not JSON") from None
    if not isinstance(fields, dict):
        raise ArtifactError(f"{where}: not a manifest, but a JSON {type(fields).__name__}")
    return fields


def _first_error(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{place}: {message}{more}" if place else f"{message}{more}"
