"""Settings for Ray beside those of `bf16-serve`: values that are passed as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from bf16kit.messages.errors import ConfigError
from service.config.serverconfig import ServerConfig


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scaling of each model.

    ``target`` is how many requests in flight one replica should have, ``queued`` how many may wait in each proxy for a
    replica.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target: float = 16.0
    queued: int = 256
    cpus: float = 1.0
    gpus: float = 0.0
    per_node: int = 0  # most replicas of one model on one node; 0: as many as fit

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; give 1 ≤ min ≤ max"
            )
        for name in ("target", "cpus"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}; give a number above 0")
        for name, least in (("queued", 1), ("per_node", 0), ("gpus", 0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{name} is {value}; give {least} or more")

    def resources(self, memory: int) -> dict[str, float]:
        """Return the resources of a node that one replica of ``memory`` bytes needs, by Ray's names."""
        return {"CPU": self.cpus, "memory": memory, **({"GPU": self.gpus} if self.gpus else {})}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"scaling: unknown key {unknown[0]!r}")
        try:
            return cls(**values)
        except TypeError as error:  # text instead of a number
            raise ConfigError(f"scaling: {error}") from None


# Settings of one process that many replicas cannot have, each with the reason for users.
_NOT_HERE = {
    "workers": "Ray scales by replicas: set --min-replicas and --max-replicas",
    "grpc_socket": "Ray's proxy listens on a port",
    "tls_certificate": "Ray's gRPC proxy speaks no TLS: put a proxy that does in front",
    "shared_memory": "a replica may be on another machine than the client",
    "load_model": "every model of the repository is served",
    **dict.fromkeys(
        (
            "receive_seconds",
            "send_seconds",
            "keepalive_seconds",
            "max_connections",
            "max_connection_idle_seconds",
            "max_connection_age_seconds",
            "compress",
        ),
        "connections are those of Ray's proxy, which has no such setting; leave it out, or put a proxy in front",
    ),
}


def check(config: ServerConfig) -> ServerConfig:
    """Return ``config`` if replicas on many machines can be served with it. Raises :class:`ConfigError` otherwise."""
    for name, reason in _NOT_HERE.items():
        value = getattr(config, name)
        if value != ServerConfig.model_fields[name].default:
            raise ConfigError(f"{name} is {value!r}, which is not supported with Ray: {reason}")
    if not config.grpc_port or not config.http_port or config.grpc_port == config.http_port:
        raise ConfigError(
            f"grpc_port is {config.grpc_port} and http_port {config.http_port}; give two that differ, and not 0: Ray's"
            " proxies listen on the same ones on every node"
        )
    if config.model_control == "explicit":
        raise ConfigError(
            "model_control is 'explicit', which is not supported with Ray: a client would reach one replica of"
            " many; give 'poll', and models are deployed and removed as the repository changes"
        )
    return config
