from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HealthCheckRequest(_message.Message):
    __slots__ = ("service",)
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    service: str
    def __init__(self, service: _Optional[str] = ...) -> None: ...

class HealthCheckResponse(_message.Message):
    __slots__ = ("status",)
    class ServingStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[HealthCheckResponse.ServingStatus]
        SERVING: _ClassVar[HealthCheckResponse.ServingStatus]
        NOT_SERVING: _ClassVar[HealthCheckResponse.ServingStatus]
        SERVICE_UNKNOWN: _ClassVar[HealthCheckResponse.ServingStatus]
    UNKNOWN: HealthCheckResponse.ServingStatus
    SERVING: HealthCheckResponse.ServingStatus
    NOT_SERVING: HealthCheckResponse.ServingStatus
    SERVICE_UNKNOWN: HealthCheckResponse.ServingStatus
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: HealthCheckResponse.ServingStatus
    def __init__(self, status: _Optional[_Union[HealthCheckResponse.ServingStatus, str]] = ...) -> None: ...

class ServerReflectionRequest(_message.Message):
    __slots__ = ("list_services",)
    LIST_SERVICES_FIELD_NUMBER: _ClassVar[int]
    list_services: str
    def __init__(self, list_services: _Optional[str] = ...) -> None: ...

class ServerReflectionResponse(_message.Message):
    __slots__ = ("list_services_response",)
    class Service(_message.Message):
        __slots__ = ("name",)
        NAME_FIELD_NUMBER: _ClassVar[int]
        name: str
        def __init__(self, name: _Optional[str] = ...) -> None: ...
    class Services(_message.Message):
        __slots__ = ("service",)
        SERVICE_FIELD_NUMBER: _ClassVar[int]
        service: _containers.RepeatedCompositeFieldContainer[ServerReflectionResponse.Service]
        def __init__(self, service: _Optional[_Iterable[_Union[ServerReflectionResponse.Service, _Mapping]]] = ...) -> None: ...
    LIST_SERVICES_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    list_services_response: ServerReflectionResponse.Services
    def __init__(self, list_services_response: _Optional[_Union[ServerReflectionResponse.Services, _Mapping]] = ...) -> None: ...
