"""The server's configuration. Precedence: flags, the environment (``BF16KIT_…``), ``server.yaml``, defaults."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from bf16kit.artifact.reading import read_bounded
from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import brief, quoted

ENV_PREFIX = "BF16KIT_"
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that only programs on this machine can reach
Port = Annotated[int, Field(ge=0, le=65535)]  # 0 = any free port; the log says which
_LARGEST_FILE = 1 << 20  # bytes
_LONGEST_INTEGER = 100  # characters of YAML: 64 bits in base 2, with an underscore here and there
Seconds = Annotated[float, Field(gt=0, le=2_000_000)]  # 23 days: what fits gRPC's milliseconds


_REPOSITORY = f"--repository DIRECTORY, or {ENV_PREFIX}REPOSITORY: the only setting without a default"


class ServerConfig(BaseSettings):
    """The checked, frozen configuration. Every key can be in ``server.yaml`` or, prefixed, in the environment."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)
    REMOVED: ClassVar[Mapping[str, str]] = {  # former keys, and what to do instead
        "trace_exporter": "give trace_rate, one trace per so many requests; 0 turns traces off",
        "trace_endpoint": "set the variable OTEL_EXPORTER_OTLP_ENDPOINT",
        "reference_ca": "leave it out; fp32 references run in a process of this server",
    }

    repository: Path
    # Error messages show `description`, not the pattern.
    host: str = Field(default="127.0.0.1", pattern=r"^[!-~]+$", description="a name or an address, in ASCII")
    grpc_port: Port = 8001
    http_port: Port = 8002
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    workers: int = Field(default=1, ge=1, le=64)  # processes that share the gRPC port

    model_control: Literal["none", "poll", "explicit"] = "none"
    poll_seconds: float = Field(default=15.0, ge=1, le=86_400)  # between two reads of the repository
    load_model: Annotated[tuple[str, ...], NoDecode] = ()  # to load at start with explicit control; "*" alone: all

    threads: int | None = Field(default=None, ge=1)  # per model, for one execution; None = the runtime's choice
    max_in_flight: int = Field(default=256, ge=1)  # requests; more are rejected at once
    max_streams: int = Field(default=64, ge=1)
    max_watches: int = Field(default=1024, ge=1)  # health watches
    max_connections: int = Field(default=4096, ge=1)  # gRPC connections
    max_message_bytes: int = Field(default=64 << 20, ge=1 << 10)
    max_request_bytes: int = Field(default=512 << 20, ge=1 << 10)  # of all requests and responses in flight
    receive_seconds: Seconds = 10.0
    send_seconds: Seconds = 30.0
    stream_idle_seconds: Seconds = 600.0
    keepalive_seconds: Seconds = 60.0
    max_connection_idle_seconds: Seconds = 1800.0
    max_connection_age_seconds: float = Field(default=0.0, ge=0, le=2_000_000)  # 0 = no limit
    overload_status: Literal["RESOURCE_EXHAUSTED", "UNAVAILABLE"] = "RESOURCE_EXHAUSTED"
    lame_duck_seconds: float = Field(default=0.0, ge=0, le=86_400)  # report not ready, but serve, before the drain
    drain_seconds: float = Field(default=25.0, ge=0, le=86_400)  # less than the 30 s after which Kubernetes kills a pod
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    # One trace per so many requests, to the collector that the OTEL_EXPORTER_OTLP_… variables name. 0: no traces.
    trace_rate: int = Field(default=0, ge=0, le=2**31 - 1)
    change_settings: bool = False  # by RPC, of log and traces; they can always be read
    evidence: bool = False  # keep a live sample of the newest breach in memory, for clients that may manage

    tls_certificate: Path | None = None  # PEM, with its chain; both ports speak TLS then
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # the CA of client certificates (mTLS)
    token_file: Path | None = None  # lines of "token scope[,scope]"
    # Services on the gRPC port that need no token.
    token_free: Annotated[tuple[Literal["health", "reflection"], ...], NoDecode] = ("health",)
    grpc_socket: Path | None = None  # a Unix socket to listen on as well
    compress: bool = False  # responses, for clients that take gzip

    shared_memory: bool = False  # clients on this machine may register parts of /dev/shm
    # The prefix of the names of files that clients may register.
    shared_memory_prefix: str = Field(
        default="bf16kit", pattern=r"^[^/\x00]*$", description="the start of a name, no /"
    )
    shared_memory_max_regions: int = Field(default=1024, ge=1, le=16_384)
    shared_memory_max_bytes: int = Field(default=1 << 30, ge=1)  # of all regions together

    http_max_connections: int = Field(default=256, ge=8, le=65_536)
    http_request_seconds: float = Field(default=5.0, gt=0, le=3_600)  # to receive a whole request, TLS included
    http_idle_seconds: float = Field(default=15.0, gt=0, le=3_600)  # between requests, and to send a response
    http_max_header_bytes: int = Field(default=16 << 10, ge=1 << 10, le=1 << 20)

    @field_validator("repository", mode="before")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        """Reject an empty path: with --repository "$UNSET" it would be the current directory, as Path("") is."""
        if value == "":
            raise ValueError("give the directory of the models")
        return value

    @field_validator("tls_certificate", "tls_key", "tls_client_ca", "token_file", "grpc_socket", mode="before")
    @classmethod
    def _path_not_empty(cls, value: Any) -> Any:
        """Reject an empty path, which comes from an unset variable.

        To treat it as absent would switch the protection off.
        """
        if value == "":
            raise ValueError("give the path of a file, or leave the key out")
        return value

    @field_validator("load_model", "token_free", mode="before")
    @classmethod
    def _parse_list(cls, value: Any) -> Any:
        """Parse a list from a variable or flag: a,b or ["a", "b"]."""
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("["):
            return tuple(each.strip() for each in value.split(","))
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("""give names with commas between them, or a list in JSON: ["a", "b"]""") from None

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("tls_certificate", "tls_key") if self.tls_certificate else ("tls_key", "tls_certificate")
            raise ValueError(f"{given} is given without {missing}; TLS needs both")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError(
                "tls_client_ca is given without tls_certificate and tls_key; clients' certificates need TLS"
            )
        return self

    @model_validator(mode="after")
    def _evidence_is_protected(self) -> Self:
        if self.evidence and self.token_file is None and self.host not in LOOPBACK:
            raise ValueError(
                f"evidence is given with host {self.host} and no token_file: anyone who reaches the HTTP port could"
                " fetch clients' data; give token_file, with the scope manage for those who may fetch it"
            )
        return self

    @model_validator(mode="after")
    def _load_model_is_consistent(self) -> Self:
        if self.load_model and self.model_control != "explicit":
            raise ValueError(f"load_model is given with model_control {self.model_control}; it needs explicit")
        if "*" in self.load_model and len(self.load_model) > 1:
            raise ValueError("load_model has * beside other names; give * alone to load all models")
        return self

    @model_validator(mode="after")
    def _workers_share_ports_only(self) -> Self:
        if self.workers > 1 and self.grpc_socket is not None:
            raise ValueError(
                f"grpc_socket is given with workers {self.workers}; processes cannot share a Unix socket: leave it out,"
                " or start with 1 worker"
            )
        return self


def load_config(flags: Mapping[str, Any], file: Path | None = None) -> ServerConfig:
    """Return the configuration from all four sources. A flag that is ``None``, or without values, was not given.

    Raises :class:`ConfigError` for a file that cannot be read, an unknown key, or a value out of range.
    """
    file_values = {} if file is None else read_mapping(file)

    class Layered(ServerConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, file_values)

    given = {key: value for key, value in flags.items() if value not in (None, ())}
    try:
        config = Layered(**given)
    except ValidationError as error:
        text = explain(error, ServerConfig, _source_of(error, given, file, file_values))
        is_missing = error.errors()[0]["type"] == "missing"
        raise ConfigError(f"{text}; give {_REPOSITORY}" if is_missing else text) from None
    if not config.repository.is_dir():
        raise ConfigError(
            f"repository {str(config.repository)!r} is not a directory; create it, or give another with --repository"
        )
    return config


def _source_of(
    error: ValidationError, flags: Mapping[str, Any], file: Path | None, file_values: Mapping[str, Any]
) -> str:
    """Return the source of the bad value or unknown key: the variable, the file, or "configuration"."""
    key = str(next(iter(error.errors()[0]["loc"]), ""))
    variable = ENV_PREFIX + key.upper()
    if key in flags:
        return "configuration"
    if key in ServerConfig.model_fields and os.environ.get(variable):
        return f"{variable} in the environment"
    return str(file) if key in file_values else "configuration"


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the YAML mapping in ``file``, as :func:`parse_mapping` does. Also raises if it cannot be read."""
    return parse_mapping(read_bounded(file, _LARGEST_FILE, ConfigError, "the limit"), file)


def parse_mapping(data: bytes, file: Path) -> dict[str, Any]:
    """Return the YAML mapping in ``data``, the bytes of ``file``; {} for an empty file.

    Raises :class:`ConfigError` with a plain reason, also for an alias and for an integer of more than 64 bits.
    """
    try:
        content = yaml.load(data.decode("utf-8"), _Loader)  # noqa: S506 -- a SafeLoader
    except _Refused as error:
        raise ConfigError(f"{file}: line {error.line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        # ValueError: no UTF-8; 2001-99-99 is no date. OverflowError: a float in base 60, which YAML has.
        raise ConfigError(f"{file}: is not YAML: {brief(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected keys and values, found {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


class _Refused(yaml.MarkedYAMLError):
    """YAML that is valid, and that no configuration needs."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(None, None, problem, mark)
        self.line = mark.line + 1


class _Loader(yaml.SafeLoader):
    """Reads plain values. A few lines with aliases may stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: yaml.AliasEvent = self.peek_event()  # type: ignore[no-untyped-call]  # yaml's own
            raise _Refused(f"*{brief(event.anchor)} is an alias: write the value itself there", event.start_mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _LONGEST_INTEGER or abs(value := super().construct_yaml_int(node)) >= 1 << 63:
            raise _Refused(f"{quoted(node.value)} has more than 64 bits: give a smaller number", node.start_mark)
        return int(value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Return the first error as text: the key, its value and what was expected; for an unknown key, the known ones.

    The mapping ``REMOVED`` of ``model`` has what to do instead of a key that it once had (nested ones with dots).
    """
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        removed: Mapping[str, str] = getattr(model, "REMOVED", {})
        if key in removed:
            return f"{where}: {quoted(key)} is not a setting any more: {removed[key]}"
        known = _fields_at(model, first["loc"][:-1])
        return f"{where}: unknown key {quoted(key)}; known keys are {', '.join(sorted(known))}"
    if first["type"] == "missing":
        return f"{where}: {quoted(key)} is missing"
    message = first["msg"].removeprefix("Value error, ")
    field = model.model_fields.get(key)
    if first["type"] == "string_pattern_mismatch" and field is not None and field.description:
        message = f"give {field.description}"
    if not key:  # an error of several keys together
        return f"{where}: {message}"
    return f"{where}: {quoted(key)} is {quoted(first['input'])}: {message[0].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the model nested at ``path``, or of the last model on the way there."""
    for part in path:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return list(model.model_fields)
