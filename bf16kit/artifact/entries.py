"""Entries of an artifact's JSON files: what all have in common, their types, and those that others use, too."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from bf16kit.messages.wording import brief, quoted
from bf16kit.numerics.tensors import BY_NAME

MOST_AXES = 64  # of numpy's arrays
# Checkpoint dtype: the other dtypes it may be stored at. Rounded to bf16, or widened to fp32, which is exact.
_RESTORES = {"float32": ("bfloat16",), "float16": ("bfloat16", "float32"), "bfloat16": ("float32",)}
_MOST_ERRORS = 1000  # that are listed to report the first: each takes a kilobyte


class Entry(BaseModel):
    """An entry that rejects undeclared keys; those of ``omitted`` are not written if empty, as in older versions."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    omitted: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {k: v for k, v in fields.items() if k not in self.omitted or v not in (None, "", [], {})}


def canonical(fields: dict[str, Any]) -> bytes:
    """Return ``fields`` as canonical JSON: sorted keys, indented by one space, UTF-8, a newline at the end."""
    return (json.dumps(fields, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def first_error(error: ValidationError) -> str:
    """Return where the first error is, what it is, and how many more there are."""
    count = error.error_count()
    if count > _MOST_ERRORS:
        return f"{count} of its values are not valid; convert the checkpoint again"
    first = error.errors(include_url=False, include_input=False)[0]
    location = brief(".".join(str(part) for part in first["loc"]))
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{location}{': ' if location else ''}{first['msg'].removeprefix('Value error, ')}{more}"


def plain_name(name: str) -> str:
    """Return ``name`` if it is a plain file name; ValueError for a path, control characters or halves of surrogates."""
    if name in ("", ".", "..") or any(c in "/\\" or ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
        raise ValueError(f"{quoted(name)} is not a plain file name")
    return name


def _known_dtype(dtype: str) -> str:
    if dtype not in BY_NAME:
        raise ValueError(f"unknown dtype {quoted(dtype)}")
    return dtype


def _read_number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _write_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


FileName = Annotated[str, AfterValidator(plain_name)]
DTypeName = Annotated[str, AfterValidator(_known_dtype)]
Size = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Shape = Annotated[list[Size], Field(max_length=MOST_AXES)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# A float that is not finite is a string, because JSON cannot express it.
Number = Annotated[float, BeforeValidator(_read_number), PlainSerializer(_write_number, when_used="json")]


class Segment(Entry):
    """A run of bytes in a file."""

    offset: Size
    bytes: Size


class TensorEntry(Entry):
    """One stored tensor of the logical ``shape``: little-endian, C order, at ``offset`` of ``file``.

    A bfloat16 tensor may have a ``residual`` segment in residual.bin. ``scale`` names the 1-D float32 tensor (one value
    per index of ``scale_axis``) that was folded into this one before rounding. A bfloat16 matrix may be stored as
    ``panels`` instead (:mod:`bf16kit.numerics.panels`): the value is the axis, 0 or 1, that holds the columns of its
    matrix product. Its residual and its scale still refer to the matrix in C order.
    """

    omitted = ("panels",)

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

    @model_validator(mode="after")
    def _consistent(self) -> TensorEntry:
        wrong = ""
        if self.dtype == "string" or self.bytes != BY_NAME[self.dtype].numpy.itemsize * math.prod(self.shape):
            wrong = f"{self.bytes} bytes do not hold"
        elif (self.scale is None) != (self.scale_axis is None) or (
            self.scale_axis is not None and self.scale_axis >= len(self.shape)
        ):
            wrong = f"scale {quoted(self.scale)} on axis {self.scale_axis} does not fit"
        elif self.panels is not None and (
            self.dtype != "bfloat16"
            or len(self.shape) < 2
            or self.panels not in range(2 if len(self.shape) == 2 else 1)
        ):
            wrong = (
                f"panels {self.panels} lie along axis 0 or 1 of a bfloat16 matrix, or 0 of a weight of images, not of"
            )
        if wrong:
            raise ValueError(f"tensor {quoted(self.name)}: {wrong} {self.dtype}{self.shape}")
        return self


class CheckpointEntry(Entry):
    """One tensor of the source checkpoint: stored tensor ``tensor``, restored, its axes permuted by ``permutation``.

    Restoring gives fp32. A ``dtype`` of float16 or bfloat16 means that the fp32 values were widened from it, exactly.
    """

    name: str
    dtype: DTypeName
    shape: Shape
    tensor: str
    permutation: Shape | None = None

    def check(self, tensors: dict[str, TensorEntry]) -> None:
        """Raise ValueError if the tensor cannot be restored from ``tensors``."""
        what, stored = f"checkpoint tensor {quoted(self.name)}", tensors.get(self.tensor)
        if stored is None:
            raise ValueError(f"{what}: no stored tensor {quoted(self.tensor)}")
        axes = list(range(len(stored.shape)))
        order = axes if self.permutation is None else self.permutation
        if sorted(order) != axes or [stored.shape[i] for i in order] != self.shape:
            raise ValueError(f"{what}: {self.shape} is not {stored.shape} permuted by {self.permutation}")
        if self.dtype != stored.dtype and stored.dtype not in _RESTORES.get(self.dtype, ()):
            raise ValueError(f"{what}: {stored.dtype} does not restore {self.dtype}")


class GivenEntry(Entry):
    """A file besides the checkpoint that shaped the model, without its directories; ``option`` named it."""

    option: Literal["--map", "--model"]
    name: FileName
    sha256: Sha256
    bytes: Size


class DriftEntry(Entry):
    """Drift measured at conversion: ``outputs[output][metric][stat]``, as ``DriftSummary.stats`` has it."""

    samples: int
    source: str
    outputs: dict[str, dict[str, dict[str, Number]]]
    emulated: bool = False


def drawn_at_random(source: str) -> bool:
    """Return whether this ``source`` of a :class:`DriftEntry` drew samples at random, so that live inputs differ."""
    return source.startswith("random ")


class _RecoveryEntry(Entry):
    model_config = ConfigDict(extra="ignore")  # earlier versions recorded more


class LookEntry(_RecoveryEntry):
    """The loss after ``step`` on the batches that are used to choose the best weights."""

    step: Size
    loss: Number


class TrainingEntry(_RecoveryEntry):
    """How the weights were trained; ``skipped`` steps changed nothing because a gradient was not finite.

    The weights after step ``kept`` had the least loss on ``yardstick`` batches of the training data, at ``looks``; step
    0 is before training. ``loss_before`` is that of the original weights, from which ``biases_corrected`` vectors
    differ at step 0. ``rate_share`` is the last learning rate as a share of the first. The oldest artifacts lack these.
    """

    steps: Size
    skipped: Size
    precision: str
    computed: str
    device: str
    loss: str = "distillation"
    loss_first: Number = math.nan
    loss_last: Number = math.nan
    learning_rate: Number
    scaling: str
    scale_first: Number
    scale_last: Number
    weights: Size
    biases_corrected: Size = 0
    yardstick: Size = 0
    loss_before: Number | None = None
    looks: list[LookEntry] = []
    kept: Size | None = None
    rate_share: Number = 1.0


class RecoveredDrift(_RecoveryEntry):
    """One metric of one output in one profile, as the budget judges it, and its ``bound`` (None: unbounded).

    ``before`` (None if there was no such profile) and ``after`` are drift from the fp32 outputs of the original
    weights, ``own`` from those of the recovered weights.
    """

    profile: str
    output: str
    metric: str
    before: Number | None
    after: Number
    own: Number
    bound: Number | None = None


class RecoveryEntry(_RecoveryEntry):
    """A recovery: ``recovered_from`` is the sha256 of its source, ``judged_on`` the origin of the judged samples."""

    recovered_from: str
    judged_on: str
    samples: Size
    held_out: bool
    training: TrainingEntry
    drift: list[RecoveredDrift] = []
