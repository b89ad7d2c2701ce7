"""The RPCs of the inference service that run no model: health, metadata, statistics, models, settings and memory."""

# ruff: noqa: N802 -- methods are named as the protocol names its RPCs, and found by that name

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from typing import NoReturn, TypeVar

from bf16kit.messages.errors import Cancelled, DeadlineExceeded, InvalidRequest, NotFound, Unavailable, Unsupported
from bf16kit.messages.wording import quoted
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.contract import Registry
from bf16kit.service.grpc.admission import RequiredScope
from bf16kit.service.grpc.inference import CallContext
from bf16kit.service.operations import ModelControl, Operations, Region, Regions, RegistryModels, Setting, Settings
from bf16kit.service.wire import metadata

# Begins like Triton's message.
_NOT_EXPLICIT = "explicit model load / unload is not allowed; start with --model-control explicit"
_NO_MEMORY = "shared memory is off; start with shared_memory: true, or send tensors in raw_input_contents"
_NO_CUDA_MEMORY = "CUDA shared memory is not supported; use system shared memory or raw_input_contents"
_NO_SETTINGS = "settings that can be read while the server runs are not supported here"
#: RPCs that may wait for minutes: they have a pool of their own.
CHANGES = ("RepositoryModelLoad", "RepositoryModelUnload")
_RESPONSE_SECONDS = 0.1  # before its deadline a wait ends, so that the client reads the outcome
T = TypeVar("T")
_LoadParameters = Mapping[str, pb.ModelRepositoryParameter]


class ControlServicer:
    """One method per RPC, named as in the protocol, with the request and its call."""

    def __init__(
        self,
        registry: Registry,
        operations: Operations,
        manage: RequiredScope = RequiredScope(),  # noqa: B008 -- frozen: no requirement
    ) -> None:
        """``manage`` is required of calls that change settings."""
        self._registry = registry
        self._operations = operations
        self._models = operations.models or RegistryModels(registry)
        self._manage = manage
        self._waiting: set[threading.Event] = set()  # calls that wait for a change
        self._draining = False

    @property
    def _control(self) -> ModelControl:
        return _on(self._operations.control, _NOT_EXPLICIT)

    @property
    def _regions(self) -> Regions:
        return _on(self._operations.regions, _NO_MEMORY)

    def drain(self) -> None:
        """End all waits for a model to load or unload."""
        self._draining = True
        for woken in tuple(self._waiting):
            woken.set()

    def ServerLive(self, message: pb.ServerLiveRequest, call: CallContext) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

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
        _check_repository(message.repository_name)
        return metadata.repository_index(self._models.index(), message.ready)

    def RepositoryModelLoad(
        self, message: pb.RepositoryModelLoadRequest, call: CallContext
    ) -> pb.RepositoryModelLoadResponse:
        """Respond once the model is served."""
        _check_repository(message.repository_name)
        name = message.model_name
        try:
            change = self._control.load(name, _load_config(message.parameters))
            self._wait(change, call, f"loading model {quoted(name)}")
        except (InvalidRequest, NotFound, Unavailable) as error:
            named = copy(error)  # other calls may wait for the same change and raise the same error
            named.args = (f"failed to load {quoted(name)}: {error}",)  # Triton's wording, which clients search for
            raise named from None
        return pb.RepositoryModelLoadResponse()

    def RepositoryModelUnload(
        self, message: pb.RepositoryModelUnloadRequest, call: CallContext
    ) -> pb.RepositoryModelUnloadResponse:
        """Respond once the model's last request is answered.

        No model depends on another here, so ``unload_dependents`` changes nothing.
        """
        control, name = self._control, message.model_name
        _check_repository(message.repository_name)
        _check_parameters("unload", "unload_dependents", "bool_param", message.parameters)
        self._wait(control.unload(name), call, f"unloading model {quoted(name)}")
        return pb.RepositoryModelUnloadResponse()

    def _wait(self, change: Future[None], call: CallContext, doing: str) -> None:
        """Return when ``change`` is done, or raise its error.

        The deadline, a client that leaves and a server that stops end the wait, but not the change.
        """
        woken = threading.Event()
        self._waiting.add(woken)
        change.add_done_callback(lambda _: woken.set())
        call.cancellation.subscribe(woken.set)
        try:
            if not self._draining:
                deadline = call.deadline
                woken.wait(None if deadline is None else max(0.0, deadline - time.monotonic() - _RESPONSE_SECONDS))
            if change.done():
                return change.result()
            if self._draining:
                raise Unavailable("the server is shutting down; try another", "draining")
            if call.cancellation.cancelled:
                raise Cancelled(f"the client left before {doing} was done; it continues")
            raise DeadlineExceeded(f"{doing} takes longer than the call's deadline; it continues: see RepositoryIndex")
        finally:
            call.cancellation.unsubscribe(woken.set)
            self._waiting.discard(woken)

    def TraceSetting(self, message: pb.TraceSettingRequest, call: CallContext) -> pb.TraceSettingResponse:
        """Return the settings as texts. A setting without values returns to its default."""
        changes = {name: tuple(setting.value) for name, setting in message.settings.items()}
        found = self._update(self._operations.traces, call, changes, message.model_name)
        value = pb.TraceSettingResponse.SettingValue
        return pb.TraceSettingResponse(
            settings={name: value(value=[str(each) for each in values]) for name, values in found.items()}
        )

    def LogSettings(self, message: pb.LogSettingsRequest, call: CallContext) -> pb.LogSettingsResponse:
        """Return the settings, each in the field of its type. A setting without a value returns to its default."""
        changes = {name: _given(setting) for name, setting in message.settings.items()}
        found = self._update(self._operations.logs, call, changes)
        return pb.LogSettingsResponse(settings={name: _log_value(values[0]) for name, values in found.items()})

    def _update(
        self, target: Settings | None, call: CallContext, changes: Mapping[str, Sequence[Setting]], model: str = ""
    ) -> Mapping[str, Sequence[Setting]]:
        settings = _on(target, _NO_SETTINGS)
        if changes:
            self._manage.check(call.metadata_value("authorization"))
        return settings.update(changes, model)

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
        _ = self._regions  # raises Unsupported if shared memory is off
        if message.name:
            raise NotFound(f"unknown CUDA shared memory region {quoted(message.name)}")
        return pb.CudaSharedMemoryStatusResponse()

    def CudaSharedMemoryRegister(self, message: pb.CudaSharedMemoryRegisterRequest, call: CallContext) -> NoReturn:
        raise Unsupported(_NO_CUDA_MEMORY)

    def CudaSharedMemoryUnregister(
        self, message: pb.CudaSharedMemoryUnregisterRequest, call: CallContext
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        _ = self._regions  # raises Unsupported if shared memory is off
        return pb.CudaSharedMemoryUnregisterResponse()


def is_managing(rpc: str) -> bool:
    """Return whether ``rpc`` needs the scope ``manage``. Settings are read with ``read``; a change is checked later."""
    return rpc in CHANGES or "SharedMemory" in rpc


def _on(part: T | None, reason: str) -> T:
    """Return a part of the operations. Raises Unsupported with ``reason`` if this server does not offer it."""
    if part is None:
        raise Unsupported(reason)
    return part


def _check_repository(name: str) -> None:
    if name:
        raise Unsupported("named repositories are not supported; leave repository_name empty")


def _load_config(parameters: _LoadParameters) -> str | None:
    """Return the parameter ``config`` of a load. Raises InvalidRequest naming any other parameter."""
    for name in parameters:
        if name.startswith("file:"):
            raise InvalidRequest(
                f"load parameter {quoted(name)}: files are not accepted over the network; put the artifact into the"
                " repository, and load it from there"
            )
    _check_parameters("load", "config", "string_param", parameters)
    return parameters["config"].string_param if "config" in parameters else None


def _check_parameters(change: str, only: str, kind: str, parameters: _LoadParameters) -> None:
    """Raise InvalidRequest for any parameter of a load or unload but ``only``, which is of this kind."""
    for name, parameter in parameters.items():
        if name != only:
            raise InvalidRequest(f"{change} parameter {quoted(name)} is not known; the only one is {only!r}")
        given = parameter.WhichOneof("parameter_choice")
        if given != kind:
            raise InvalidRequest(f"{change} parameter {name!r} came as {given or 'nothing'}, expected {kind}")


def _given(setting: pb.LogSettingsRequest.SettingValue) -> tuple[Setting, ...]:
    kind = setting.WhichOneof("parameter_choice")
    return () if kind is None else (getattr(setting, kind),)


def _log_value(value: Setting) -> pb.LogSettingsResponse.SettingValue:
    sent = pb.LogSettingsResponse.SettingValue()
    setattr(sent, {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)], value)
    return sent
