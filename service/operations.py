"""The operations of a running server beside inference. With several processes, the supervisor does them in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from bf16kit.messages.errors import Unsupported
from bf16kit.numerics.tensors import Array
from bf16kit.service.contract import Registry, StatisticsSnapshot

_STATES = {"ready": "READY", "loading": "LOADING", "unavailable": "UNAVAILABLE"}
Setting: TypeAlias = bool | int | str


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository's index. A model that was never loaded has neither version nor state."""

    name: str
    version: str = ""
    state: str = ""  # READY, LOADING, UNLOADING, UNAVAILABLE, as Triton names them
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VersionStatistics:
    """The statistics of one ready version of a model, over all processes. ``device`` is as in ``RuntimeInfo``."""

    name: str
    version: int
    device: str
    snapshot: StatisticsSnapshot


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region of shared memory: ``byte_size`` bytes of the file ``key`` from ``offset`` on."""

    name: str
    key: str
    offset: int
    byte_size: int


class RegistryModels:
    """The models that are served, and their statistics: here what the registry of one process knows."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def index(self) -> Sequence[IndexEntry]:
        """Return every known model and version, sorted by name and version."""
        slots = self._registry.models()
        return [IndexEntry(slot.name, str(slot.version), _STATES[slot.state], slot.reason) for slot in slots]

    def statistics(self, name: str, version: str) -> Sequence[VersionStatistics]:
        """Return the statistics of the ready versions: all, or those of ``name``, or one. Raises NotFound."""
        if version:
            found = [self._registry.get(name, version)]
        else:
            if name:
                self._registry.find(name, "")  # raises NotFound for what does not exist
            slots = (slot for slot in self._registry.models() if name in ("", slot.name))
            found = [model for slot in slots if (model := slot.model) is not None]
        return [VersionStatistics(model.name, model.version, model.info.device, model.statistics) for model in found]


#: The protocol's extensions of a server that has :class:`ModelControl`.
MODEL_CONTROL = ("model_repository", "model_repository(unload_dependents)")


class ModelControl(Protocol):
    """Changes which models are served. If a change fails, the models that are served stay."""

    def load(self, name: str, config: str | None = None) -> Future[None]:
        """Load ``name`` as the repository holds it now; ``config``, a ModelConfig in JSON, overrides ``serving.yaml``.

        The future ends when every process serves the model, or fails with the reason. Raises NotFound or
        InvalidRequest. Versions that are served already and have not changed are not loaded again.
        """

    def unload(self, name: str) -> Future[None]:
        """Unload ``name``. The future ends when the last request to it has been answered; at once if none is served."""


class RegionSlice(Protocol):
    """Bytes of a region, which stay valid even if it is unregistered.

    Both methods raise InvalidRequest if the region's file no longer holds these bytes.
    """

    def read(self) -> bytes:
        """Return a copy."""

    def write(self, data: Array) -> None:
        """Copy ``data`` to the beginning. Raises InvalidRequest if it is longer than the slice."""


class Regions(Protocol):
    """Registered regions of shared memory. Every method raises InvalidRequest or NotFound naming the region."""

    def register(self, region: Region) -> None:
        """Register a region. Raises AlreadyExists for a name that is taken, Overloaded if a limit is reached."""

    def unregister(self, name: str) -> None:
        """Forget a region, or all for an empty name. An unknown name is no error; existing slices stay valid."""

    def status(self, name: str) -> Sequence[Region]:
        """Return the region of this name, or all of them for an empty name."""

    def lease(self, name: str, offset: int, byte_size: int) -> RegionSlice: ...


class Settings(Protocol):
    """Named values that can be changed while the server runs. ``model`` names a model; empty: the server itself."""

    def update(self, changes: Mapping[str, Sequence[Setting]], model: str = "") -> Mapping[str, Sequence[Setting]]:
        """Apply all changes, or none if one is wrong; return all settings. Raises InvalidRequest or NotFound.

        A setting without values returns to its default. The result depends only on the changes and their order, so
        every process that gets the same changes has the same settings.
        """


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """Settings that can be read; a change raises Unsupported with the ``remedy``."""

    settings: Settings
    remedy: str

    def update(self, changes: Mapping[str, Sequence[Setting]], model: str = "") -> Mapping[str, Sequence[Setting]]:
        if changes:
            raise Unsupported(f"settings can be read, but not changed; {self.remedy}")
        return self.settings.update({}, model)


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations that this server offers. None: the operation is off, and its RPCs are rejected with a remedy."""

    models: RegistryModels | None = None  # None: the registry's own
    control: ModelControl | None = None
    regions: Regions | None = None
    logs: Settings | None = None
    traces: Settings | None = None
    extensions: tuple[str, ...] = field(default=())  # of the protocol, in addition to those that are always on
