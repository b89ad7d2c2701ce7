"""``serving.yaml``: how one model is served. Everything has a default; a key that does not exist is an error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator

from bf16kit.errors import ConfigError
from service.drift.shadow import ShadowPolicy
from service.process.config import explain, read_mapping

FILE_NAME = "serving.yaml"
DEFAULT_MAX_BATCH_SIZE = 32


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FallbackPolicy(_Part):
    """When to answer with fp32 instead. Only ``none`` exists in this version."""

    policy: str = "none"

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value

    @field_validator("policy")
    @classmethod
    def _only_none(cls, value: str) -> str:
        if value != "none":
            raise ValueError("automatic fallback to fp32 is not in this version; the only policy is 'none'")
        return value


class VersionPolicy(_Part):
    """Which versions of a model are served: ``all``, ``{latest: 2}`` or ``{specific: [1, 4]}``."""

    latest: PositiveInt | None = None
    specific: tuple[PositiveInt, ...] | None = None
    all: Literal[True] | None = None

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return {"all": True} if value == "all" else value

    @model_validator(mode="after")
    def _exactly_one(self) -> VersionPolicy:
        if sum(part is not None for part in (self.latest, self.specific, self.all)) != 1:
            raise ValueError("give exactly one of: all, latest: N, specific: [N, …]")
        return self

    def choose(self, versions: Sequence[int]) -> list[int]:
        """The versions to serve of those that exist, ascending. Raises :class:`ConfigError` for one that does not."""
        existing = sorted(versions)
        if self.specific is not None:
            missing = sorted(set(self.specific) - set(existing))
            if missing:
                raise ConfigError(f"version_policy asks for version {missing[0]}; there are {existing}")
            return sorted(set(self.specific))
        return existing[-self.latest :] if self.latest is not None else existing


class Serving(_Part):
    """The whole of ``serving.yaml``."""

    max_batch_size: int | None = Field(
        default=None, ge=0
    )  # rows; 0 = no batching; None = 32 where there is a batch axis
    max_queue_delay_ms: float = Field(default=0.0, ge=0, le=60_000)  # 0: batch what is waiting, never wait for more
    max_queue_size: PositiveInt = 128  # requests
    instances: Annotated[int, Field(ge=1, le=64)] = 1  # batches running at once
    version_policy: VersionPolicy = VersionPolicy(latest=1)
    warmup: tuple[PositiveInt, ...] = (1,)  # rows of the executions before ready; () = none
    shadow: ShadowPolicy = ShadowPolicy()
    fallback: FallbackPolicy = FallbackPolicy()
    budget: dict[str, float | None] = {}  # replaces single bounds of the manifest's budget; null = no bound


def load_serving(model_dir: Path) -> Serving:
    """The model's ``serving.yaml``, or the defaults where there is none. Raises :class:`ConfigError` naming the key."""
    file = model_dir / FILE_NAME
    if not os.path.lexists(file):  # a dangling link, say of a volume, is an error and not a wish for the defaults
        return Serving()
    content = read_mapping(file)
    try:
        return Serving(**content)
    except ValidationError as error:
        raise ConfigError(explain(error, Serving, str(file))) from None
