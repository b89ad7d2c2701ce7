"""What operators may ask of a running server beside inference: protocols, which import neither gRPC nor the models.

One process answers by itself; several have their supervisor answer, which asks all of them. The transport cannot tell
the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from bf16kit.errors import Unsupported
from bf16kit.tensors import Array
from service.contract import Registry, StatisticsSnapshot

_STATES = {"ready": "READY", "loading": "LOADING", "unavailable": "UNAVAILABLE"}
Setting: TypeAlias = bool | int | str


@dataclass(frozen=True, slots=True)
class Indexed:
    """A line of the repository's index. One that was never loaded has neither version nor state."""

    name: str
    version: str = ""
    state: str = ""  # READY, LOADING, UNLOADING, UNAVAILABLE, as Triton names them
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Counted:
    """What one ready version of a model has done, in all processes together. ``device`` is as in ``RuntimeInfo``."""

    name: str
    version: int
    device: str
    seen: StatisticsSnapshot


@dataclass(frozen=True, slots=True)
class Region:
    """A part of shared memory that a client has registered: ``byte_size`` bytes of ``key`` from ``offset`` on."""

    name: str
    key: str
    offset: int
    byte_size: int


class Models(Protocol):
    """Which models are served."""

    def index(self) -> Sequence[Indexed]:
        """Every model and version that is known, by name and version."""
        ...

    def statistics(self, name: str, version: str) -> Sequence[Counted]:
        """Of every ready version; of those of ``name``; or of the one ``version``. Raises NotFound."""
        ...


class RegistryModels:
    """The :class:`Models` of one process, and nothing of a repository beside them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def index(self) -> Sequence[Indexed]:
        slots = self._registry.models()
        return [Indexed(slot.name, str(slot.version), _STATES[slot.state], slot.reason) for slot in slots]

    def statistics(self, name: str, version: str) -> Sequence[Counted]:
        if version:
            found = [self._registry.get(name, version)]
        else:
            if name:
                self._registry.find(name, "")  # raises NotFound for what does not exist
            slots = (slot for slot in self._registry.models() if name in ("", slot.name))
            found = [model for slot in slots if (model := slot.model) is not None]
        return [Counted(model.name, model.version, model.info.device, model.statistics.snapshot()) for model in found]


#: The protocol's extensions of a server that has :class:`ModelControl`.
MODEL_CONTROL = ("model_repository", "model_repository(unload_dependents)")


class ModelControl(Protocol):
    """Changes which models are served. What served goes on serving where the change cannot be made."""

    def load(self, name: str, config: str | None = None) -> Future[None]:
        """Serve what the repository holds of ``name`` now; ``config`` is a ModelConfig in JSON that overrides.

        The future ends when every process serves it, or fails with the reason. Raises NotFound or InvalidRequest. What
        is served already, and has not changed, is left alone.
        """
        ...

    def unload(self, name: str) -> Future[None]:
        """Serve ``name`` no more; the future ends when its last request is answered, or at once where there is no such
        model, or nothing of it is served."""
        ...


class RegionSlice(Protocol):
    """Bytes of a region, which stay there for as long as somebody refers to this, whether it is registered or not.

    Both methods raise InvalidRequest where the region's file no longer has them.
    """

    def read(self) -> bytes:
        """A copy: what the client writes afterwards is not in it."""
        ...

    def write(self, data: Array) -> None:
        """Copy the bytes of ``data`` to the beginning. Raises InvalidRequest where there are too many."""
        ...


class Regions(Protocol):
    """Registered shared memory. Every method raises InvalidRequest or NotFound naming the region."""

    def register(self, region: Region) -> None:
        """Raises AlreadyExists for a name that is taken, Overloaded where there are as many as may be."""
        ...

    def unregister(self, name: str) -> None:
        """Forget a region, which need not be known, or, for an empty name, all; slices that are out stay valid."""
        ...

    def status(self, name: str) -> Sequence[Region]:
        """The region of this name; all of them for an empty one."""
        ...

    def lease(self, name: str, offset: int, byte_size: int) -> RegionSlice: ...


class Settings(Protocol):
    """Named values that may be changed while the server runs. ``model``: those of one model; empty: the server's."""

    def update(self, changes: Mapping[str, Sequence[Setting]], model: str = "") -> Mapping[str, Sequence[Setting]]:
        """Change these, none of them where one is wrong; returns all. One without values goes back to its default.

        Raises InvalidRequest naming the setting, or NotFound naming the model. The same changes in the same
        order make any process' settings the same.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """Settings that may be looked at and not changed. ``remedy``: how to let them be changed."""

    settings: Settings
    remedy: str

    def update(self, changes: Mapping[str, Sequence[Setting]], model: str = "") -> Mapping[str, Sequence[Setting]]:
        """See :meth:`Settings.update`; raises Unsupported for any change."""
        if changes:
            raise Unsupported(f"settings can be read, but not changed; {self.remedy}")
        return self.settings.update({}, model)


@dataclass(frozen=True, slots=True)
class Operations:
    """What is there of it; None: it is off, and its RPCs are refused with what to do instead."""

    models: Models | None = None  # None: the registry's own
    control: ModelControl | None = None
    regions: Regions | None = None
    logs: Settings | None = None
    traces: Settings | None = None
    extensions: tuple[str, ...] = field(default=())  # of the protocol, beside those that are always there
