"""Manifest entries: stored tensors, the checkpoint tensors that they restore, exports, and other given files."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import BY_NAME


def plain_name(name: str) -> str:
    """Return ``name`` if it is a plain file name.

    ValueError for a path, ``.``, ``..``, control characters, or halves of surrogate pairs.
    """
    if name in ("", ".", "..") or any(c in "/\\" or ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
        raise ValueError(f"{quoted(name)} is not a plain file name")
    return name


def _known_dtype(dtype: str) -> str:
    if dtype not in BY_NAME:
        raise ValueError(f"unknown dtype {quoted(dtype)}")
    return dtype


FileName = Annotated[str, AfterValidator(plain_name)]
DTypeName = Annotated[str, AfterValidator(_known_dtype)]
# Checkpoint dtype: the other dtypes it may be stored at. Rounded to bf16, or widened to fp32, which is exact.
_RESTORES = {
    "float32": ("bfloat16",),
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float32",),
}
Size = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
MOST_AXES = 64  # of numpy's arrays
Shape = Annotated[list[Size], Field(max_length=MOST_AXES)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# Manifest models are frozen and reject undeclared keys.
STRICT = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class _Entry(BaseModel):
    model_config = STRICT


class Segment(_Entry):
    """A run of bytes in a file."""

    offset: Size
    bytes: Size


class TensorEntry(_Entry):
    """One stored tensor of the logical ``shape``: little-endian, C order, at ``offset`` of ``file``.

    A bfloat16 tensor has a ``residual`` segment in residual.bin unless the residual was left out. ``scale`` names the
    1-D float32 tensor (one value per index of ``scale_axis``) that was folded into this one before rounding. A bfloat16
    matrix may be stored as ``panels`` instead (:mod:`bf16kit.numerics.panels`): the value is the axis, 0 or 1, that
    holds the columns of its matrix product. Its residual and its scale still refer to the matrix in C order.
    """

    name: str
    dtype: DTypeName
    shape: Shape
    file: FileName
    offset: Size
    bytes: Size
    residual: Segment | None = None
    scale: str | None = None
    scale_axis: Size | None = None
    panels: int | None = None

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit ``panels`` when there are none, so that the bytes are those of schema version 1."""
        fields: dict[str, Any] = handler(self)
        if self.panels is None:
            del fields["panels"]
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> TensorEntry:
        expected = BY_NAME[self.dtype].numpy.itemsize * math.prod(self.shape)
        if self.dtype == "string" or self.bytes != expected:
            raise ValueError(f"tensor {quoted(self.name)}: {self.bytes} bytes do not hold {self.dtype}{self.shape}")
        if (self.scale is None) != (self.scale_axis is None):
            raise ValueError(f"tensor {quoted(self.name)}: scale and scale_axis belong together")
        if self.scale_axis is not None and self.scale_axis >= len(self.shape):
            raise ValueError(f"tensor {quoted(self.name)}: scale_axis {self.scale_axis} is not an axis of {self.shape}")
        if self.panels is not None and (self.dtype != "bfloat16" or len(self.shape) != 2 or self.panels not in (0, 1)):
            raise ValueError(
                f"tensor {quoted(self.name)}: panels {self.panels} of {self.dtype}{self.shape}; panels lie along axis 0"
                " or 1 of a bfloat16 matrix"
            )
        return self


class GivenEntry(_Entry):
    """A file besides the checkpoint that shaped the model.

    ``name`` has no directories; ``option`` is the option that named the file.
    """

    option: Literal["--map", "--model"]
    name: FileName
    sha256: Sha256
    bytes: Size


class ExportEntry(_Entry):
    """The same weights as plain ``files`` for other programs; this project does not serve them.

    Drift is measured by running the widened tensors in the fp32 reference. ``verified`` is ``host`` after that run and
    ``no`` before.
    """

    files: Annotated[list[FileName], Field(min_length=1)]
    precision: str
    verified: Literal["host", "no"]
    note: str = ""


class CheckpointEntry(_Entry):
    """One tensor of the source checkpoint: stored tensor ``tensor``, restored, its axes permuted by ``permutation``.

    Restoring gives fp32. A ``dtype`` of float16 or bfloat16 means that the fp32 values were widened from it, exactly.
    """

    name: str
    dtype: DTypeName
    shape: Shape
    tensor: str
    permutation: Shape | None = None


def check_scale(tensor: TensorEntry, tensors: dict[str, TensorEntry]) -> None:
    """Raise ValueError if the scale of ``tensor`` is missing, or does not have one value per index of its axis."""
    if tensor.scale is None or tensor.scale_axis is None:
        return
    scale = tensors.get(tensor.scale)
    if scale is None or scale.dtype != "float32" or scale.shape != [tensor.shape[tensor.scale_axis]]:
        raise ValueError(
            f"tensor {quoted(tensor.name)}: its scale {quoted(tensor.scale)} is not a stored float32 tensor of"
            f" {tensor.shape[tensor.scale_axis]} values"
        )


def check_source(entry: CheckpointEntry, tensors: dict[str, TensorEntry]) -> None:
    """Raise ValueError if ``entry`` cannot be restored from ``tensors``."""
    tensor = tensors.get(entry.tensor)
    if tensor is None:
        raise ValueError(f"checkpoint tensor {quoted(entry.name)}: no stored tensor {quoted(entry.tensor)}")
    order = list(range(len(tensor.shape))) if entry.permutation is None else entry.permutation
    if sorted(order) != list(range(len(tensor.shape))) or [tensor.shape[i] for i in order] != entry.shape:
        raise ValueError(
            f"checkpoint tensor {quoted(entry.name)}: {entry.shape} is not {tensor.shape} permuted by"
            f" {entry.permutation}"
        )
    if entry.dtype != tensor.dtype and tensor.dtype not in _RESTORES.get(entry.dtype, ()):
        raise ValueError(f"checkpoint tensor {quoted(entry.name)}: {tensor.dtype} does not restore {entry.dtype}")


def _read_number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _write_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


Number = Annotated[float, BeforeValidator(_read_number), PlainSerializer(_write_number, when_used="json")]


def drawn_at_random(source: str) -> bool:
    """Return whether the samples of a :class:`DriftEntry`, whose ``source`` this is, were drawn at random.

    They are drawn when none were given, and ``source`` says so. They differ from live inputs, so do not derive anything
    from them that is compared with live ones.
    """
    return source.startswith("random ")


class DriftEntry(_Entry):
    """Drift measured at conversion: ``outputs[output][metric][stat]``, as ``DriftSummary.as_dict`` gives it."""

    samples: int
    source: str
    outputs: dict[str, dict[str, dict[str, Number]]]
    emulated: bool = False


class OracleFigure(_Entry):
    """The fp32 reference's distance from the source framework in one output, and the bound on ``relative_l2``."""

    relative_l2: Number
    max_abs: Number
    bound: Number


class OracleEntry(_Entry):
    """Whether the fp32 reference was checked against the source framework's own outputs, before any rounding.

    ``how`` names the program that computed them, or the reason why none could; ``feeds`` is how many samples were
    compared.
    """

    checked: bool
    how: str
    feeds: Size = 0
    outputs: dict[str, OracleFigure] = {}
