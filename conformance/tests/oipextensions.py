"""The extensions of :mod:`oipserver`: configuration, statistics, models, shared memory, classification, settings."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from google.protobuf.json_format import Parse, ParseError

from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.wire import Tensor as Value

if TYPE_CHECKING:
    from oipserver import Served

Code = grpc.StatusCode
_SHM = Path("/dev/shm")
_TRACE = {"trace_level": "OFF", "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": ""}
Parameters = Mapping[str, pb.InferParameter]


class Refused(Exception):
    """An error: a status other than OK."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Extensions:
    """The RPCs of the extensions, which are not part of the protocol itself."""

    DECLARED = (
        "classification", "sequence", "model_repository", "schedule_policy", "model_configuration", "parameters",
        "system_shared_memory", "cuda_shared_memory", "statistics", "trace", "logging",
    )  # fmt: skip

    def __init__(self, models: dict[str, Served]) -> None:
        self.models = models
        self.regions: dict[str, pb.SystemSharedMemoryRegisterRequest] = {}
        self.traces: dict[str, dict[str, str]] = {"": dict(_TRACE)}
        self.log: dict[str, Any] = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0}
        self.log |= {"log_format": "default", "log_file": ""}
        self._lock = threading.Lock()

    def found(self, name: str, version: str) -> Served:
        """Return a model that is ready, or raise :class:`Refused`."""
        model = self.models.get(name)
        if version and not re.fullmatch(r"\d{1,18}", version):
            raise Refused(Code.INVALID_ARGUMENT, f"version {version!r} is no number")
        if model is None or not model.ready:
            raise Refused(Code.NOT_FOUND, f"unknown model {name[:200]!r}")
        if version and str(int(version)) not in model.versions:
            raise Refused(Code.NOT_FOUND, f"unknown version {version!r} of model {name!r}")
        return model

    # --- configuration and statistics -------------------------------------------------------------------------------

    def ModelConfig(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        return self.found(request.name, request.version).config()

    def count(self, model: Served, version: str, rows: int, ns: int) -> None:
        """Count a request that succeeded."""
        with self._lock:
            seen = model.counts.setdefault(version, pb.ModelStatistics(name=model.name, version=version))
            seen.inference_count += rows
            seen.execution_count += 1
            seen.last_inference = int(time.time() * 1000)
            for duration in (seen.inference_stats.success, seen.inference_stats.compute_infer):
                duration.count += 1
                duration.ns += ns
            batch = next((b for b in seen.batch_stats if b.batch_size == rows), None)
            (batch or seen.batch_stats.add(batch_size=rows)).compute_infer.count += 1

    def ModelStatistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        models = [self.found(request.name, request.version)] if request.name else [*self.models.values()]
        made = pb.ModelStatisticsResponse()
        with self._lock:
            for model in models:
                for version in model.versions:
                    if version == request.version or not request.version:
                        seen = model.counts.get(version, pb.ModelStatistics(name=model.name, version=version))
                        made.model_stats.append(seen)
        return made

    # --- the repository ---------------------------------------------------------------------------------------------

    def RepositoryIndex(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        _no_name(request.repository_name)
        made = pb.RepositoryIndexResponse()
        for model in self.models.values():
            for version in model.versions:
                if model.ready or not request.ready:
                    made.models.add(name=model.name, version=version, state="READY" if model.ready else "UNAVAILABLE")
        return made

    def RepositoryModelLoad(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        _no_name(request.repository_name)
        if request.model_name not in self.models:
            raise Refused(Code.INTERNAL, f"failed to load {request.model_name!r}")
        for name, value in request.parameters.items():
            if name != "config" or value.WhichOneof("parameter_choice") != "string_param":
                raise Refused(Code.INVALID_ARGUMENT, f"unrecognized load parameter {name!r}, or of a wrong type")
            try:
                Parse(value.string_param, pb.ModelConfig())
            except (ParseError, json.JSONDecodeError):
                raise Refused(Code.INTERNAL, f"failed to load {request.model_name!r}") from None
        self.models[request.model_name].ready = True
        return pb.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        if request.model_name in self.models:
            self.models[request.model_name].ready = False
        return pb.RepositoryModelUnloadResponse()

    # --- shared memory ----------------------------------------------------------------------------------------------

    def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        if request.name and request.name not in self.regions:
            raise Refused(Code.NOT_FOUND, f"no region {request.name!r}")
        made = pb.SystemSharedMemoryStatusResponse()
        for name, region in self.regions.items():
            if name == request.name or not request.name:
                status = made.regions[name]
                status.name, status.key, status.offset, status.byte_size = (
                    name,
                    region.key,
                    region.offset,
                    region.byte_size,
                )
        return made

    def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        if request.name in self.regions:
            raise Refused(Code.ALREADY_EXISTS, f"region {request.name!r} is there")
        file = _SHM / request.key.lstrip("/")
        if not request.name or not request.byte_size or "/" in request.key[1:] or not file.is_file():
            raise Refused(Code.INVALID_ARGUMENT, f"region {request.name!r} cannot be")
        if request.offset + request.byte_size > file.stat().st_size:
            raise Refused(Code.INVALID_ARGUMENT, f"region {request.name!r} ends behind its memory")
        self.regions[request.name] = request
        return pb.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        for name in [request.name] if request.name else [*self.regions]:
            self.regions.pop(name, None)
        return pb.SystemSharedMemoryUnregisterResponse()

    def CudaSharedMemoryStatus(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        return pb.CudaSharedMemoryStatusResponse()

    def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        raise Refused(Code.INVALID_ARGUMENT, "no CUDA")

    def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        return pb.CudaSharedMemoryUnregisterResponse()

    # --- settings ---------------------------------------------------------------------------------------------------

    def TraceSetting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        if request.model_name:
            self.found_setting(request.model_name)
        own = self.traces.setdefault(request.model_name, {})
        for name, setting in request.settings.items():
            if name == "trace_file":
                raise Refused(Code.UNIMPLEMENTED, "trace_file cannot be changed")
            if not setting.value:
                own.pop(name, None)
            elif name == "trace_rate" and not setting.value[0].isdecimal():
                raise Refused(Code.INVALID_ARGUMENT, f"unable to parse trace_rate {setting.value[0]!r}")
            else:
                own[name] = setting.value[0]
        made = pb.TraceSettingResponse()
        for name, value in (_TRACE | self.traces[""] | own).items():
            made.settings[name].value.append(value)
        return made

    def found_setting(self, name: str) -> None:
        if name not in self.models:
            raise Refused(Code.INVALID_ARGUMENT, f"unknown model {name!r}")

    def LogSettings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        for name, setting in request.settings.items():
            choice = setting.WhichOneof("parameter_choice")
            value = getattr(setting, choice) if choice else None
            if name == "log_file":
                raise Refused(Code.UNIMPLEMENTED, "log_file cannot be changed")
            if type(value) is not type(self.log[name]) or (name == "log_format" and value != "default"):
                raise Refused(Code.INVALID_ARGUMENT, f"{name} cannot be {value!r}")
            self.log[name] = value
        made = pb.LogSettingsResponse()
        for name, value in self.log.items():
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(made.settings[name], kind, value)
        return made


def _no_name(repository: str) -> None:
    if repository:
        raise Refused(Code.UNIMPLEMENTED, "'repository_name' is not supported")


def _place(server: Extensions, name: str, parameters: Parameters) -> tuple[Path, int, int] | None:
    """Return the file, offset and size of a tensor in shared memory; None if the tensor is not there."""
    if "shared_memory_region" not in parameters:
        return None
    region = server.regions.get(parameters["shared_memory_region"].string_param)
    if region is None:
        raise Refused(Code.NOT_FOUND, f"no region for {name!r}")
    if "shared_memory_byte_size" not in parameters:
        raise Refused(Code.INVALID_ARGUMENT, f"no shared_memory_byte_size for {name!r}")
    size = parameters["shared_memory_byte_size"].int64_param
    offset = parameters["shared_memory_offset"].int64_param if "shared_memory_offset" in parameters else 0
    if size <= 0 or offset < 0 or offset + size > region.byte_size:
        raise Refused(Code.INVALID_ARGUMENT, f"offset and size of {name!r} are outside its region")
    return _SHM / region.key.lstrip("/"), region.offset + offset, size


def read_region(server: Extensions, name: str, parameters: Parameters) -> bytes | None:
    """Return the bytes of an input from its region; None if the input is not in a region."""
    if (place := _place(server, name, parameters)) is None:
        return None
    file, offset, size = place
    return file.read_bytes()[offset : offset + size]


def write_region(server: Extensions, name: str, data: bytes, parameters: Parameters) -> bytes:
    """Write an output to its region if it has one. Return the bytes that remain to be sent."""
    if (place := _place(server, name, parameters)) is None:
        return data
    file, offset, size = place
    if size < len(data):
        raise Refused(Code.INVALID_ARGUMENT, f"{size} bytes are too few for {name!r}")
    with file.open("r+b") as memory:
        memory.seek(offset)
        memory.write(data)
    return b""


def classes(model: Served, tensor: Value, parameters: Parameters) -> Value:
    """Return the highest values as "value:index" if the request wants a classification, else the tensor."""
    if "classification" not in parameters:
        return tensor
    if tensor.datatype == "BYTES":
        raise Refused(Code.INVALID_ARGUMENT, "strings have no classes")
    count = parameters["classification"].int64_param
    if count < 1 or parameters["classification"].WhichOneof("parameter_choice") != "int64_param":
        raise Refused(Code.INVALID_ARGUMENT, "'classification' is an int64 of 1 or more")
    rows = tensor.array.reshape(tensor.array.shape[0] if model.max_batch_size else 1, -1)
    made = []
    for row in rows:
        best = np.argsort(-row, kind="stable")[:count]
        made.append([f"{row[k]:f}:{k}".encode() for k in best])
    array = np.array(made, np.object_)
    return Value("BYTES", array if model.max_batch_size else array[0])
