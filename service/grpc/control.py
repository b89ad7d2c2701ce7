"""The RPCs of the inference service that run no model: liveness, readiness, metadata, statistics and the repository."""

# ruff: noqa: N802 -- methods are named as the protocol names its RPCs, and found by that name

from __future__ import annotations

from copy import copy

from bf16kit.messages.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from bf16kit.messages.wording import quoted
from bf16kit.protocol import inference_pb2 as pb
from service.contract import Registry
from service.grpc.callcontext import CallContext
from service.grpc.changes import Changes
from service.grpc.credentials import RequiredScope
from service.operations import ModelControl, Operations, Region, Regions, RegistryModels, Settings
from service.wire import metadata, settings
from service.wire.repository import check_repository, check_unload, load_config

_NO_SCOPE = RequiredScope(None, None)

# Begins like Triton's message.
_NOT_EXPLICIT = "explicit model load / unload is not allowed; start with --model-control explicit"
_NO_MEMORY = "shared memory is off; start with shared_memory: true, or send tensors in raw_input_contents"
#: For RPCs that this server may not answer: the reason, and the alternative.
OFF_REASONS = {
    "RepositoryModelLoad": _NOT_EXPLICIT,
    "RepositoryModelUnload": _NOT_EXPLICIT,
    "SystemSharedMemoryStatus": _NO_MEMORY,
    "SystemSharedMemoryRegister": _NO_MEMORY,
    "SystemSharedMemoryUnregister": _NO_MEMORY,
    "CudaSharedMemoryStatus": _NO_MEMORY,
    "CudaSharedMemoryRegister": "CUDA shared memory is not supported; use system shared memory or raw_input_contents",
    "CudaSharedMemoryUnregister": _NO_MEMORY,
    "TraceSetting": "tracing cannot be changed while the server runs; set it when starting",
    "LogSettings": "the log cannot be changed while the server runs; set log_level when starting",
}
#: The member of :class:`Operations` that answers an RPC, if it is on.
_PARTS = {
    "RepositoryModelLoad": "control",
    "RepositoryModelUnload": "control",
    "SystemSharedMemoryStatus": "regions",
    "SystemSharedMemoryRegister": "regions",
    "SystemSharedMemoryUnregister": "regions",
    "CudaSharedMemoryStatus": "regions",
    "CudaSharedMemoryUnregister": "regions",
    "TraceSetting": "traces",
    "LogSettings": "logs",
}
#: RPCs that may wait for minutes: they have a lane of their own.
CHANGES = ("RepositoryModelLoad", "RepositoryModelUnload")
#: RPCs that both read and change: the scope ``read`` admits a call, and a change needs a further check.
SETTINGS = ("TraceSetting", "LogSettings")


class ControlServicer:
    """One method per RPC, named as in the protocol, with the request and its call."""

    def __init__(self, registry: Registry, operations: Operations, manage: RequiredScope = _NO_SCOPE) -> None:
        """``manage`` is required of calls that change settings."""
        self._registry = registry
        self._operations = operations
        self._models = operations.models or RegistryModels(registry)
        self._changes = Changes()
        self._manage = manage

    def offers(self, rpc: str) -> bool:
        """Whether this server answers ``rpc``, or rejects it with the text in :data:`OFF_REASONS`."""
        part = _PARTS.get(rpc)
        return rpc not in OFF_REASONS if part is None else getattr(self._operations, part) is not None

    def drain(self) -> None:
        """End all waits for a model to load or unload."""
        self._changes.drain()

    def ServerLive(self, message: pb.ServerLiveRequest, call: CallContext) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._registry.live)

    def ServerReady(self, message: pb.ServerReadyRequest, call: CallContext) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._registry.ready)

    def ModelReady(self, message: pb.ModelReadyRequest, call: CallContext) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._registry.is_ready(message.name, message.version))

    def ServerMetadata(self, message: pb.ServerMetadataRequest, call: CallContext) -> pb.ServerMetadataResponse:
        return metadata.server_metadata(self._operations.extensions)

    def ModelMetadata(self, message: pb.ModelMetadataRequest, call: CallContext) -> pb.ModelMetadataResponse:
        model = self._registry.get(message.name, message.version)
        return metadata.model_metadata(model, self._registry.versions(model.name))

    def ModelConfig(self, message: pb.ModelConfigRequest, call: CallContext) -> pb.ModelConfigResponse:
        return metadata.model_config(self._registry.get(message.name, message.version))

    def ModelStatistics(self, message: pb.ModelStatisticsRequest, call: CallContext) -> pb.ModelStatisticsResponse:
        """Return statistics of every ready model, of every ready version of ``name``, or of one version."""
        return metadata.model_statistics(self._models.statistics(message.name, message.version))

    def RepositoryIndex(self, message: pb.RepositoryIndexRequest, call: CallContext) -> pb.RepositoryIndexResponse:
        check_repository(message.repository_name)
        return metadata.repository_index(self._models.index(), message.ready)

    def RepositoryModelLoad(
        self, message: pb.RepositoryModelLoadRequest, call: CallContext
    ) -> pb.RepositoryModelLoadResponse:
        """Respond once the model is served."""
        check_repository(message.repository_name)
        name = message.model_name
        try:
            change = self._control.load(name, load_config(message.parameters))
            self._changes.wait(change, call, f"loading model {quoted(name)}")
        except (InvalidRequest, NotFound, Unavailable) as error:
            named = copy(error)  # other calls may wait for the same change and raise the same error
            named.args = (f"failed to load {quoted(name)}: {error}",)  # Triton's wording, which clients search for
            raise named from None
        return pb.RepositoryModelLoadResponse()

    def RepositoryModelUnload(
        self, message: pb.RepositoryModelUnloadRequest, call: CallContext
    ) -> pb.RepositoryModelUnloadResponse:
        """Respond once the model's last request is answered."""
        check_repository(message.repository_name)
        check_unload(message.parameters)
        name = message.model_name
        self._changes.wait(self._control.unload(name), call, f"unloading model {quoted(name)}")
        return pb.RepositoryModelUnloadResponse()

    @property
    def _control(self) -> ModelControl:
        if self._operations.control is None:
            raise Unsupported("models cannot be loaded over the network")  # unreachable: see offers()
        return self._operations.control

    def TraceSetting(self, message: pb.TraceSettingRequest, call: CallContext) -> pb.TraceSettingResponse:
        changes = settings.trace_changes(message)
        return settings.trace_response(self._update(self._operations.traces, call, changes, message.model_name))

    def LogSettings(self, message: pb.LogSettingsRequest, call: CallContext) -> pb.LogSettingsResponse:
        return settings.log_response(self._update(self._operations.logs, call, settings.log_changes(message)))

    def _update(
        self, target: Settings | None, call: CallContext, changes: settings.Settings, model: str = ""
    ) -> settings.Settings:
        if target is None:
            raise Unsupported("there are no such settings")  # unreachable: see offers()
        if changes:
            self._manage.check(call.metadata)
        return target.update(changes, model)

    def SystemSharedMemoryStatus(
        self, message: pb.SystemSharedMemoryStatusRequest, call: CallContext
    ) -> pb.SystemSharedMemoryStatusResponse:
        return metadata.regions_status(self._regions.status(message.name))

    def SystemSharedMemoryRegister(
        self, message: pb.SystemSharedMemoryRegisterRequest, call: CallContext
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._regions.register(Region(message.name, message.key, message.offset, message.byte_size))
        return pb.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(
        self, message: pb.SystemSharedMemoryUnregisterRequest, call: CallContext
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._regions.unregister(message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def CudaSharedMemoryStatus(
        self, message: pb.CudaSharedMemoryStatusRequest, call: CallContext
    ) -> pb.CudaSharedMemoryStatusResponse:
        """Return no regions. perf_analyzer unregisters all regions of both kinds before it uses either."""
        if message.name:
            raise NotFound(f"unknown CUDA shared memory region {quoted(message.name)}")
        return pb.CudaSharedMemoryStatusResponse()

    def CudaSharedMemoryUnregister(
        self, message: pb.CudaSharedMemoryUnregisterRequest, call: CallContext
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        return pb.CudaSharedMemoryUnregisterResponse()

    @property
    def _regions(self) -> Regions:
        if self._operations.regions is None:
            raise Unsupported(_NO_MEMORY)
        return self._operations.regions
