"""``serving.yaml``: how one model is served. Every key has a default; an unknown key is an error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from bf16kit.artifact.entries import plain_name
from bf16kit.artifact.reading import read_bounded
from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import quoted
from bf16kit.messages.yamltext import parse_mapping
from bf16kit.service.config.serverconfig import explain
from bf16kit.service.contract import QueueBounds, Scheduling
from bf16kit.service.drift.contract import FallbackPolicy, ShadowPolicy

FILE_NAME = "serving.yaml"
DEFAULT_MAX_BATCH_SIZE = 32
# Bytes. A file with every key has 3 KiB; Python reads YAML slowly, 1 MiB in ten seconds.
_LARGEST_FILE, _LARGEST_LABELS = 64 << 10, 16 << 20


class VersionPolicy(BaseModel):
    """Which versions of a model are served: ``all``, ``{latest: 2}`` or ``{specific: [1, 4]}``.

    If one of the latest cannot be loaded, an older version serves instead, unless ``strict`` is set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class Serving(BaseModel):
    """The whole of ``serving.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Descriptions are docs/configuration.md (`make docs`).
    max_batch_size: int | None = Field(
        default=None,
        ge=0,
        le=65_536,
        description="Rows of a batch; 0 = no batching. Without it 32, if the artifact declares a batch axis.",
    )
    max_queue_delay_ms: float = Field(
        default=0.0,
        ge=0,
        le=60_000,
        description="How long a request may wait for others; 0 batches what is in the queue and never waits.",
    )
    max_queue_size: PositiveInt = Field(
        default=128, description="Requests in the queue; more are rejected with RESOURCE_EXHAUSTED."
    )
    max_queue_ms: float = Field(
        default=100.0,
        gt=0,
        le=3_600_000,
        description="Longest expected wait, by the time that rows of the same shape took; beyond it"
        " RESOURCE_EXHAUSTED. One batch may always wait, and nothing is rejected for its wait before the model has"
        " run 10 batches.",
    )
    max_dims: dict[str, PositiveInt] = Field(
        default={}, description="Largest sizes of free dimensions, by name: `{seq: 512}`."
    )
    instances: int = Field(
        default=1, ge=1, le=64, description="Batches that run at once; they share the server's threads equally."
    )
    profile: Literal["auto", "cpu", "cpu-bf16", "cuda", "torchscript", "pt2"] = Field(
        default="auto", description="What runs; `auto` chooses by a fixed rule."
    )
    version_policy: VersionPolicy = Field(
        default=VersionPolicy(latest=1),
        description="`all`, `{latest: N}` or `{specific: [1, 4]}`. If one of the latest cannot be loaded, an older"
        " version serves; not with `strict: true`.",
    )
    golden_seconds: float = Field(
        default=3600.0,
        ge=0,
        le=2_000_000,
        description="Time between two runs of the golden samples while the model serves; 0 = only at load.",
    )
    warmup: tuple[PositiveInt, ...] = Field(
        default=(1,), description="Rows of the executions before the model is ready; `[]` = none."
    )
    shadow: ShadowPolicy = Field(default=ShadowPolicy(), description="Which live requests are measured.")
    fallback: FallbackPolicy = Field(
        default=FallbackPolicy(),
        description="What happens over the budget; the policy alone may be given: `fallback: fp32`.",
    )
    labels: dict[str, tuple[str, ...]] = Field(
        default={},
        description="Names of an output's classes: `{logits: labels.txt}`, a file in the model's directory with one a"
        " line.",
    )
    budget: dict[str, float | None] = Field(
        default={},
        description="Replaces single bounds of the artifact's budget: `{relative_l2: 1e-2}`; `null` = no bound.",
    )

    @model_validator(mode="after")
    def _fallback_is_measured(self) -> Serving:
        if self.fallback.policy == "fp32" and not self.shadow.on:
            raise ValueError(
                "fallback: fp32 needs live drift measurement, but shadow.rate is 0; raise it, or set fallback: alert"
            )
        return self

    def scheduling(self) -> Scheduling:
        """Return the queue limits and served versions as the contract has them."""
        versions = self.version_policy.latest or self.version_policy.specific
        return Scheduling(QueueBounds(self.max_queue_size, self.max_queue_ms / 1e3), versions)


def load_serving(model_dir: Path) -> Serving:
    """Return the model's ``serving.yaml``, or the defaults without one. Raises :class:`ConfigError` naming the key."""
    file = model_dir / FILE_NAME
    if not os.path.lexists(file):  # a dangling link (a missing volume) is an error: it must not select the defaults
        return Serving()
    try:
        content = parse_mapping(_read(file, _LARGEST_FILE, str(file)), file)
    except ConfigError as error:  # its first line is enough for the log, clients and the status page
        raise ConfigError(str(error).splitlines()[0]) from None
    if isinstance(labels := content.get("labels"), dict):
        content["labels"] = {output: _read_labels(file, output, name) for output, name in labels.items()}
    try:
        return Serving(**content)
    except ValidationError as error:
        raise ConfigError(explain(error.errors(), Serving, str(file))) from None


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
