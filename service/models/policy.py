"""``serving.yaml``: how one model is served. Every key has a default; an unknown key is an error."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from bf16kit.artifact.entries import plain_name
from bf16kit.artifact.reading import read_bounded
from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import quoted
from service.batching.queue import LevelPolicy
from service.config.serverconfig import explain, parse_mapping
from service.contract import QueueBounds, Scheduling
from service.drift.fallbackpolicy import FallbackPolicy
from service.drift.policy import ShadowPolicy

FILE_NAME = "serving.yaml"
DEFAULT_MAX_BATCH_SIZE = 32
AUTO = 0  # how ``instances: auto`` is stored
# Bytes. A file with every key has 3 KiB; Python reads YAML slowly, 1 MiB in ten seconds.
_LARGEST_FILE, _LARGEST_LABELS = 64 << 10, 16 << 20


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VersionPolicy(_Part):
    """Which versions of a model are served: ``all``, ``{latest: 2}`` or ``{specific: [1, 4]}``.

    If one of the latest cannot be loaded, an older version serves instead, unless ``strict`` is set.
    """

    latest: PositiveInt | None = None
    strict: bool = False
    specific: tuple[PositiveInt, ...] | None = None
    all: Literal[True] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"all": True} if value == "all" else value

    @model_validator(mode="after")
    def _exactly_one(self) -> VersionPolicy:
        if sum(part is not None for part in (self.latest, self.specific, self.all)) != 1:
            raise ValueError("give exactly one of: all, latest: N, specific: [N, …]")
        if self.strict and self.latest is None:
            raise ValueError("strict: true needs latest: N: with all or specific no other version is ever tried")
        return self

    @property
    def tries_older(self) -> bool:
        """Whether an older version may serve in place of one that cannot be loaded."""
        return self.latest is not None and not self.strict

    def choose(self, versions: Sequence[int]) -> list[int]:
        """Return the versions to serve of those that exist, ascending.

        Raises :class:`ConfigError` for a version that does not exist.
        """
        existing = sorted(versions)
        if self.specific is not None:
            missing = sorted(set(self.specific) - set(existing))
            if missing:
                raise ConfigError(f"version_policy asks for version {missing[0]}; the versions are {existing}")
            return sorted(set(self.specific))
        return existing[-self.latest :] if self.latest is not None else existing


class LevelBounds(_Part):
    """Queue limits of one priority level. A key that is left out has the limit of the whole queue."""

    max_queue_size: PositiveInt | None = None
    max_queue_ms: float | None = Field(default=None, gt=0, le=3_600_000)


class Serving(_Part):
    """The whole of ``serving.yaml``."""

    REMOVED: ClassVar[Mapping[str, str]] = {  # former keys, and what to do instead
        "shadow.reference": "leave it out, or set shadow.rate: 0 to measure nothing; other servers run no reference",
        "shadow.reference_memory_bytes": "leave it out; the container's memory limit bounds the references",
    }

    # Rows; 0 = no batching; None = 32 where there is a batch axis.
    max_batch_size: int | None = Field(default=None, ge=0, le=65_536)
    max_queue_delay_ms: float = Field(default=0.0, ge=0, le=60_000)  # 0: batch what is waiting, never wait for more
    max_queue_size: PositiveInt = 128  # requests
    max_queue_ms: float = Field(default=100.0, gt=0, le=3_600_000)  # expected wait, from the measured pace
    max_queue_bytes: PositiveInt = 256 << 20  # of all waiting inputs
    priority_levels: Annotated[int, Field(ge=0, le=64)] = 0  # 0: a request's priority is checked and ignored
    default_priority_level: PositiveInt = 1  # for requests that set none; 1 is the most urgent
    priority_queue_policy: dict[PositiveInt, LevelBounds] = {}  # limits of single levels
    max_dims: dict[str, PositiveInt] = {}  # the largest sizes of free dimensions, by name
    max_response_bytes: Annotated[int, Field(ge=1, le=2_000_000_000)] = 256 << 20  # protobuf holds 2 GiB
    instances: Annotated[int, Field(ge=0, le=64)] = 1  # batches at once; AUTO: measured when the model is loaded
    beside: Annotated[int, Field(ge=0, le=64)] = 1  # more batches at once, of other shapes; on CPUs
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None  # of one execution; None = the server's --threads
    profile: Literal["auto", "cpu", "cpu-bf16", "cuda", "torchscript", "pt2"] = "auto"
    version_policy: VersionPolicy = VersionPolicy(latest=1)
    # Mapped weights share the page cache. Changing their file in place corrupts responses or crashes the server.
    weights: Literal["copied", "mapped"] = "copied"
    first_run_seconds: float = Field(default=300.0, gt=0, le=86_400)  # limit of a run at load: a graph may never end
    golden_seconds: float = Field(
        default=3600.0, ge=0, le=2_000_000
    )  # between two runs of the golden samples; 0: at load
    warmup: tuple[PositiveInt, ...] = (1,)  # rows of the executions before ready; () = none
    shadow: ShadowPolicy = ShadowPolicy()
    fallback: FallbackPolicy = FallbackPolicy()
    labels: dict[str, tuple[str, ...]] = {}  # of an output's classes; the YAML names a file with one per line
    formats: dict[str, Literal["NCHW", "NHWC"]] = {}  # image layouts of inputs: only told to clients
    budget: dict[str, float | None] = {}  # replaces single bounds of the manifest's budget; null = no bound

    @field_validator("instances", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        if value == 0 and value is not False:
            raise ValueError("give 1 to 64, or auto")
        return AUTO if value == "auto" else value

    @field_serializer("instances")
    def _instances(self, value: int) -> int | str:
        return "auto" if value == AUTO else value

    @model_validator(mode="after")
    def _levels_exist(self) -> Serving:
        levels = max(self.priority_levels, 1)
        for level in (self.default_priority_level, *self.priority_queue_policy):
            if level > levels:
                raise ValueError(f"priority level {level} is asked for, but priority_levels is {self.priority_levels}")
        return self

    @model_validator(mode="after")
    def _fallback_is_measured(self) -> Serving:
        if self.fallback.policy == "fp32" and not self.shadow.on:
            raise ValueError(
                "fallback: fp32 needs live drift measurement, but shadow.rate is 0; turn shadow on, or set fallback:"
                " alert"
            )
        return self

    def levels(self) -> tuple[LevelPolicy, ...]:
        """Return the limits of every priority level, the most urgent first; one level if there are no priorities."""
        return tuple(self._level(number) for number in range(1, max(self.priority_levels, 1) + 1))

    def scheduling(self) -> Scheduling:
        """Return the queue limits and served versions as the contract has them."""
        levels = dict(enumerate(self.levels(), 1))
        return Scheduling(
            QueueBounds(self.max_queue_size, self.max_queue_ms / 1e3),
            self.priority_levels,
            self.default_priority_level,
            {n: QueueBounds(levels[n].max_requests, levels[n].max_wait_s) for n in self.priority_queue_policy},
            self.version_policy.latest or self.version_policy.specific,
        )

    def _level(self, number: int) -> LevelPolicy:
        own = self.priority_queue_policy.get(number, LevelBounds())
        wait_ms = self.max_queue_ms if own.max_queue_ms is None else own.max_queue_ms
        return LevelPolicy(own.max_queue_size or self.max_queue_size, wait_ms / 1e3)


def load_serving(model_dir: Path) -> Serving:
    """Return the model's ``serving.yaml``, or the defaults without one. Raises :class:`ConfigError` naming the key."""
    file = model_dir / FILE_NAME
    if not os.path.lexists(file):  # a dangling link (a missing volume) is an error: it must not select the defaults
        return Serving()
    content = parse_mapping(_read(file, _LARGEST_FILE, str(file)), file)
    if isinstance(labels := content.get("labels"), dict):
        content["labels"] = {output: _read_labels(file, output, name) for output, name in labels.items()}
    try:
        return Serving(**content)
    except ValidationError as error:
        raise ConfigError(explain(error, Serving, str(file))) from None


def _read_labels(serving: Path, output: object, name: object) -> tuple[str, ...]:
    """Return the lines of the file ``name`` beside ``serving.yaml``, without empty lines at its end."""
    key = f"{serving}: {quoted(f'labels.{output}')}"
    try:
        file = serving.with_name(plain_name(name if isinstance(name, str) else ""))
    except ValueError:
        raise ConfigError(
            f"{key} is {quoted(name)}: name a file in the model's directory, with one label per line"
        ) from None
    where = f"{key}: {quoted(name)}"
    try:
        return tuple(_read(file, _LARGEST_LABELS, where).decode("utf-8").rstrip().splitlines())
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8") from None


def _read(file: Path, most: int, where: str) -> bytes:
    """Read a file of a model's directory. A link may lead to another place in the repository, and no further."""
    return read_bounded(file, most, ConfigError, "the limit", within=file.parent.parent, where=where)
