"""The server's configuration. Precedence: flags, the environment (``BF16KIT_…``), ``server.yaml``, defaults."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import first_few, quoted, unknown_names, with_similar
from bf16kit.messages.yamltext import read_mapping

ENV_PREFIX = "BF16KIT_"
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that only programs on this machine can reach
Port = Annotated[int, Field(ge=0, le=65535)]  # 0 = any free port; the log says which
# Variables with our prefix that are no settings: read by the command line, the CPU kernel, `health`, the converter.
_OTHER_VARIABLES = ("CONFIG", "HEALTH_CERTIFICATE", "HEALTH_KEY", "KERNEL_PATH", "TENSORFLOW_PYTHON", "TOKEN")
# Variables that Kubernetes sets in every pod for a Service whose name begins with bf16kit: no typos.
_KUBERNETES_SERVICE = re.compile(r".*_SERVICE_(HOST|PORT.*)|.*_PORT_\d+_(TCP|UDP|SCTP).*")
_EXPECTED = {  # for types that pydantic calls by Python's names
    "dict_type": "give keys and values, {key: value}",
    "model_type": "give keys and values, {key: value}",
    "tuple_type": "give a list, [a, b]",
    "path_type": "give a path",
}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_PROTECTIONS = ("tls_certificate", "tls_key", "tls_client_ca", "token_file")
_REPOSITORY = f"--repository DIRECTORY, or {ENV_PREFIX}REPOSITORY: the only setting without a default"


class ServerConfig(BaseModel):
    """The checked, frozen configuration. Every key can be in ``server.yaml`` or, prefixed, in the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Descriptions are docs/configuration.md (`make docs`). Error messages show `title`, not the pattern.
    repository: Path = Field(
        description="Directory of `<model>/<version>/` artifacts, read at the start, and later as `model_control` says."
    )
    host: str = Field(
        default="127.0.0.1",
        pattern=r"^[!-~]+$",
        title="a name or an address, in ASCII",
        description="Address of both ports.",
    )
    grpc_port: Port = Field(default=8001, description="Port of gRPC; 0 takes any free one, and the log says which.")
    http_port: Port = Field(
        default=8002, description="Port of metrics, probes and the status page; 0 takes any free one."
    )
    http_inference: bool = Field(
        default=False,
        description="The HTTP port answers the protocol's REST form too, under `/v2` ([rest.md](rest.md)). Needs"
        " `workers` 1.",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        title="auto, cpu, cuda or cuda:N",
        description="`auto` uses a GPU if ONNX Runtime can use one, otherwise the CPU.",
    )
    workers: int = Field(default=1, ge=1, le=64, description="Processes that share the gRPC port.")

    model_control: Literal["none", "poll", "explicit"] = Field(
        default="none",
        description="`none`: serve the models of the start. `poll`: follow changes of the repository. `explicit`:"
        " clients load and unload models, and change log and trace settings.",
    )
    poll_seconds: float = Field(default=15.0, ge=1, le=86_400, description="Time between two scans of the repository.")
    load_model: tuple[str, ...] = Field(
        default=(), description="With `explicit`, the models to load at the start; `*` alone means all."
    )

    threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of one execution of a model, shared by its `instances`. Without it the runtime chooses;"
        " with several workers, each has its part of the processors.",
    )
    max_in_flight: int = Field(
        default=256,
        ge=1,
        description="Requests that run or wait, in each worker; more are rejected with RESOURCE_EXHAUSTED. A"
        " connection has at most 64 open calls, or a quarter of this number if that is more.",
    )
    max_message_bytes: int = Field(
        default=64 << 20,
        ge=1 << 10,
        description="Largest request; less in a small container. All requests, and the responses that clients have not"
        " read yet, may hold eight times as much.",
    )
    max_connection_age_seconds: float = Field(
        default=0.0,
        ge=0,
        le=2_000_000,
        description="After this time the server asks a connection to close, so that clients spread over new servers; 0"
        " = never.",
    )
    lame_duck_seconds: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="After SIGTERM, how long the server reports that it is not ready and still serves: the time that a"
        " load balancer needs to notice.",
    )
    drain_seconds: float = Field(
        default=25.0,
        ge=0,
        le=86_400,
        description="How long a stop waits for requests in flight; keep it below the time after which the process is"
        " killed (30 s in Kubernetes).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level of a line on standard error."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Lines of text, or one JSON object a line.")
    trace_rate: int = Field(
        default=0,
        ge=0,
        le=2**31 - 1,
        description="One in so many requests is traced, of those that belong to no trace yet, and sent to the"
        " collector that the variables `OTEL_EXPORTER_OTLP_…` name; 0 = no traces.",
    )
    evidence: bool = Field(
        default=False,
        description="Keep a live row of each model's newest breach in memory, for clients with the scope `manage`."
        " Needs `token_file` unless `host` is `127.0.0.1`, `::1` or `localhost`.",
    )

    tls_certificate: Path | None = Field(
        default=None, description="PEM certificate with its chain; both ports then speak TLS. Needs `tls_key`."
    )
    tls_key: Path | None = Field(default=None, description="PEM private key, unencrypted. Needs `tls_certificate`.")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM certificate of the authority that must have signed clients' certificates."
    )
    token_file: Path | None = Field(
        default=None, description="Lines of a token and its scopes: `infer`, `read`, `manage`."
    )

    shared_memory: bool | str = Field(
        default=False,
        description="Clients of this machine may register files of `/dev/shm`. `true`: those whose names begin with"
        " `bf16kit`. A text: those that begin with it. `*`: all.",
    )

    @field_validator("repository", *_PROTECTIONS, mode="before")
    @classmethod
    def _path_not_empty(cls, value: Any) -> Any:
        """Reject an empty path, which comes from an unset variable: as absent, it would switch the protection off."""
        if value == "":
            raise ValueError("give a path; leave it out for none")
        return value

    @field_validator("load_model", mode="before")
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

    @field_validator("shared_memory", mode="before")
    @classmethod
    def _parse_prefix(cls, value: Any) -> Any:
        """Parse true, false or a prefix; variables are text."""
        if isinstance(value, bool) or str(value).lower() in _TRUE + _FALSE:
            return value if isinstance(value, bool) else str(value).lower() in _TRUE
        if not isinstance(value, str) or not re.fullmatch(r"\*|[^/\0*]+", value) or value.lower() == "none":
            raise ValueError("give true, false, the start of a file's name without /, or * for every name")
        return value

    @property
    def region_prefix(self) -> str:
        """What the names of files begin with that clients may register, if ``shared_memory`` is on."""
        if isinstance(self.shared_memory, bool):
            return "bf16kit"
        return "" if self.shared_memory == "*" else self.shared_memory

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
    def _one_process_has_rest(self) -> Self:
        if self.http_inference and self.workers > 1:
            raise ValueError(
                f"http_inference is given with workers {self.workers}; the HTTP port of several workers runs no models:"
                " give workers 1, or leave http_inference out and use the gRPC port"
            )
        return self

    @model_validator(mode="after")
    def _load_model_is_consistent(self) -> Self:
        if self.load_model and self.model_control != "explicit":
            raise ValueError(f"load_model is given with model_control {self.model_control}; it needs explicit")
        if "*" in self.load_model and len(self.load_model) > 1:
            raise ValueError("load_model has * beside other names; give * alone to load all models")
        return self


def load_config(flags: Mapping[str, Any], file: Path | None = None) -> ServerConfig:
    """Return the configuration from all four sources. A flag that is ``None``, or without values, was not given.

    Raises :class:`ConfigError` for a file that cannot be read, an unknown key, or a value out of range.
    """
    if file is None and os.environ.get(f"{ENV_PREFIX}CONFIG") == "":
        raise ConfigError(f"{ENV_PREFIX}CONFIG in the environment is empty: give a path, or unset it for no file")
    read = {} if file is None else read_mapping(file)
    in_file = {key: "" if value is None else value for key, value in read.items()}  # a template's empty value
    in_environment = _settings_of(os.environ)
    given = {key: value for key, value in flags.items() if value not in (None, ())}
    try:
        config = ServerConfig(**{**in_file, **in_environment, **given})
    except ValidationError as error:

        def source_of(found: ErrorDetails) -> str:
            key = str(next(iter(found["loc"]), ""))
            if key in in_environment and key not in given:
                return f"{ENV_PREFIX}{key.upper()} in the environment"
            return str(file) if key in in_file and key not in given else "configuration"

        # Unknown keys first: a setting that is missing may be one of them.
        errors = sorted(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
        source = source_of(errors[0])
        text = explain([found for found in errors if source_of(found) == source], ServerConfig, source)
        raise ConfigError(f"{text}; give {_REPOSITORY}" if errors[0]["type"] == "missing" else text) from None
    if not config.repository.is_dir():
        raise ConfigError(
            f"repository {str(config.repository)!r} is not a directory; create it, or give another with --repository"
        )
    return config


def _settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in the environment. An empty variable was not set, unless its setting protects the server."""
    given = {name.upper(): value for name, value in environment.items()}
    settings = {key: given.get(ENV_PREFIX + key.upper()) for key in ServerConfig.model_fields}
    return {key: value for key, value in settings.items() if value or (value == "" and key in _PROTECTIONS)}


def unknown_variables(environment: Mapping[str, str]) -> str:
    """Return a message that names the variables with our prefix that nothing reads: typos; "" if there are none.

    Each is shown with the most similar known one, and without its value: it may be a secret.
    """
    known = [name.upper() for name in (*ServerConfig.model_fields, *_OTHER_VARIABLES)]
    unknown = [
        with_similar(name, known, ENV_PREFIX)
        for name, value in sorted(environment.items())
        if name.upper().startswith(ENV_PREFIX) and name.upper().removeprefix(ENV_PREFIX) not in known
        if not _KUBERNETES_SERVICE.fullmatch(name) and not (name.endswith("_PORT") and "://" in value)
    ]
    if not unknown:
        return ""
    return f"unknown environment variables are ignored: {first_few(unknown)}; docs/configuration.md names every setting"


def explain(errors: Sequence[ErrorDetails], model: type[BaseModel], where: str) -> str:
    """Return as text all unknown keys among ``errors``, or else the first: the key, its value and what was expected."""
    if unknown := [error["loc"] for error in errors if error["type"] == "extra_forbidden"]:
        known = {_dotted((*loc[:-1], field)) for loc in unknown for field in _fields_at(model, loc[:-1])}
        return f"{where}: {unknown_names('key', [*map(_dotted, unknown)], known)}"
    first = errors[0]
    key = _dotted(first["loc"])
    if first["type"] == "missing":
        return f"{where}: {quoted(key)} is missing"
    message = _EXPECTED.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    field = model.model_fields.get(key)
    if first["type"] == "string_pattern_mismatch" and field is not None and field.title:
        message = f"give {field.title}"
    if not key:  # an error of several keys together
        return f"{where}: {message}"
    return f"{where}: {quoted(key)} is {quoted(first['input'])}: {message[0].lower()}{message[1:]}"


def _dotted(loc: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in loc)


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the model nested at ``path``, or of the last model on the way there."""
    for part in path:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return list(model.model_fields)
