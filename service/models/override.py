"""Applies a client's ``ModelConfig`` (JSON, sent with a load) on top of ``serving.yaml``.

Only the fields that it names change. Fields without a counterpart here are rejected by name rather than ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AliasGenerator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from bf16kit.messages.errors import InvalidRequest
from bf16kit.messages.wording import brief, quoted
from service.config.serverconfig import explain
from service.models.plan import DesiredModel
from service.models.policy import Serving
from service.models.tensordescriptions import Tensor, TensorDescriptions

_MICROSECONDS = 1e-3  # in milliseconds
#: Parameters of the ModelConfig response that report how the model runs; they are ignored if a client sends them back.
_REPORTED = (
    *("precision", "accumulation", "kernel", "device", "note", "choice"),
    *("golden", "active_precision", "active_precision_reason"),
)
_SUBJECT = "load parameter 'config'"
_UNSET: tuple[Any, ...] = (None, "", 0, [], {})  # how protobuf's printers write a field that was never set


def _require_unset(value: Any) -> Any:
    if value in _UNSET:
        return None
    raise ValueError("is not supported")


def _reject_bool(value: Any) -> Any:
    if isinstance(value, bool):  # a bool is an int in Python
        raise PydanticCustomError("no_number", "Expected a number")
    return value


_Unsupported = Annotated[None, BeforeValidator(_require_unset)]
#: The ranges of single keys are checked with those of serving.yaml.
_Number = Annotated[int, BeforeValidator(_reject_bool), Field(ge=0, lt=1 << 63)]


class _Part(BaseModel):
    """A part of ModelConfig. Names are those of Triton's model_config.proto, as written there or in camelCase."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, alias_generator=AliasGenerator(validation_alias=to_camel)
    )


class _Latest(_Part):
    num_versions: _Number = 1


class _Specific(_Part):
    versions: tuple[_Number, ...] = Field(min_length=1)


class _All(_Part):
    pass


class _VersionPolicy(_Part):
    latest: _Latest | None = None
    all: _All | None = None
    specific: _Specific | None = None

    def serving(self) -> dict[str, Any]:
        given = {
            "latest": None if self.latest is None else self.latest.num_versions,
            "specific": None if self.specific is None else self.specific.versions,
            "all": None if self.all is None else True,
        }
        return {key: value for key, value in given.items() if value is not None}


class _QueuePolicy(_Part):
    timeout_action: Literal["REJECT", 0] = "REJECT"
    default_timeout_microseconds: _Number = 0
    allow_timeout_override: bool = True
    max_queue_size: _Number = 0

    def serving(self) -> dict[str, Any]:
        """Return the keys of ``serving.yaml``. 0 means in Triton that no limit is set."""
        bounds: dict[str, Any] = {}
        if self.max_queue_size:
            bounds["max_queue_size"] = self.max_queue_size
        if self.default_timeout_microseconds:
            bounds["max_queue_ms"] = self.default_timeout_microseconds * _MICROSECONDS
        return bounds


class _DynamicBatching(_Part):
    preferred_batch_size: _Unsupported = None
    max_queue_delay_microseconds: _Number | None = None
    preserve_ordering: _Unsupported = None
    priority_levels: _Number | None = None
    default_priority_level: _Number | None = None
    default_queue_policy: _QueuePolicy = _QueuePolicy()
    priority_queue_policy: dict[_Number, _QueuePolicy] | None = None

    def serving(self) -> dict[str, Any]:
        changes = self.default_queue_policy.serving()
        if self.max_queue_delay_microseconds is not None:
            changes["max_queue_delay_ms"] = self.max_queue_delay_microseconds * _MICROSECONDS
        if self.priority_levels is not None:
            changes["priority_levels"] = self.priority_levels
        if self.default_priority_level:
            changes["default_priority_level"] = self.default_priority_level
        if self.priority_queue_policy is not None:
            changes["priority_queue_policy"] = {n: each.serving() for n, each in self.priority_queue_policy.items()}
        return changes


class _InstanceGroup(_Part):
    """An instance group. It cannot choose the device: the server's ``--device`` does."""

    name: str = ""
    kind: Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU"] = "KIND_AUTO"
    count: _Number | None = None
    gpus: tuple[_Number, ...] = ()


class _Transactions(_Part):
    decoupled: _Unsupported = None


class _Parameter(_Part):
    string_value: str = ""


class _ModelConfig(_Part):
    """The fields that can be changed, and those that the server itself reports, which clients send back."""

    name: str = ""
    platform: Literal["", "onnxruntime_onnx", "pytorch_libtorch"] = ""
    backend: Literal["", "onnxruntime", "pytorch"] = ""
    input: tuple[Tensor, ...] = ()
    output: tuple[Tensor, ...] = ()
    model_transaction_policy: _Transactions = _Transactions()
    version_policy: _VersionPolicy | None = None
    max_batch_size: _Number | None = None
    dynamic_batching: _DynamicBatching | None = None
    instance_group: tuple[_InstanceGroup, ...] = Field(default=(), max_length=1)
    parameters: dict[str, _Parameter] = {}

    def serving(self) -> dict[str, Any]:
        """Return the keys of ``serving.yaml`` that this config changes."""
        changes: dict[str, Any] = {}
        if self.version_policy is not None:
            changes["version_policy"] = self.version_policy.serving()
        if self.max_batch_size is not None:
            changes["max_batch_size"] = self.max_batch_size
        formats = {each.name: each.format.removeprefix("FORMAT_") for each in self.input}
        if formats := {name: form for name, form in formats.items() if form != "NONE"}:
            changes["formats"] = formats
        if self.dynamic_batching is not None:
            changes |= self.dynamic_batching.serving()
        for group in self.instance_group:  # at most one
            if group.count is not None:
                changes["instances"] = group.count
            if group.kind == "KIND_GPU":
                changes["profile"] = "cuda"
        if "profile" in self.parameters:
            changes["profile"] = self.parameters["profile"].string_value
        return changes


class ConfigOverride:
    """A client's ``config`` for model ``model``. The constructor and methods raise InvalidRequest naming the field."""

    def __init__(self, model: str, config: str) -> None:
        parsed = _parse(model, config)
        self._changes = parsed.serving()
        self._tensors = TensorDescriptions(parsed.input, parsed.output)

    def change(self, serving: Serving) -> Serving:
        """Return ``serving`` with the changes applied."""
        changes = {**serving.model_dump(exclude_unset=True), **self._changes}
        if "latest" in self._changes.get("version_policy", {}):  # ModelConfig has no field for strict
            changes["version_policy"] = {**self._changes["version_policy"], "strict": serving.version_policy.strict}
        changes["formats"] = {**serving.formats, **self._changes.get("formats", {})}
        try:
            return Serving.model_validate(changes)
        except ValidationError as error:
            raise InvalidRequest(brief(explain(error, Serving, _SUBJECT))) from None

    def check(self, desired: DesiredModel) -> None:
        """Check that the resulting model can be served, and has the inputs and outputs that the client described."""
        for plan in desired.plans:
            if plan.broken:
                raise InvalidRequest(f"model {desired.name!r} cannot be served with this configuration: {plan.broken}")
            self._tensors.check(plan.path)


def _parse(model: str, config: str) -> _ModelConfig:
    try:
        written = json.loads(config)
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"{_SUBJECT}: is not JSON: give a ModelConfig, as the RPC of that name returns it"
        ) from None
    if not isinstance(written, dict):
        raise InvalidRequest(f"{_SUBJECT}: expected a JSON object, a ModelConfig")
    unknown = [key for key, value in written.items() if key not in _KNOWN and value not in _UNSET]
    if unknown:
        raise InvalidRequest(f"{_SUBJECT}: {quoted(unknown[0])} is not supported; the fields are {_CHANGEABLE}")
    try:
        parsed = _ModelConfig.model_validate({key: value for key, value in written.items() if key in _KNOWN})
    except ValidationError as error:
        raise InvalidRequest(brief(f"{_SUBJECT}: {_explain(error)}")) from None
    if parsed.name not in ("", model):
        raise InvalidRequest(f"{_SUBJECT}: its name is {quoted(parsed.name)}, the model's is {quoted(model)}")
    for key in parsed.parameters:
        if key != "profile" and key not in _REPORTED:
            raise InvalidRequest(f"{_SUBJECT}: parameter {quoted(key)} is not supported; the only one is 'profile'")
    return parsed


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = quoted(".".join(map(str, first["loc"])))
    if first["type"] in ("extra_forbidden", "value_error"):
        return f"{field} is not supported"
    return f"{field} is {quoted(str(first['input']))}: {first['msg'][0].lower()}{first['msg'][1:]}"


_KNOWN = {name for field in _ModelConfig.model_fields for name in (field, to_camel(field))}
_CHANGEABLE = "version_policy, max_batch_size, dynamic_batching, instance_group, parameters['profile']"
