"""What a model's replicas are given: their number and resources, and the server's settings with limits that fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import Manifest
from bf16kit.messages.errors import ArtifactError, ConfigError
from bf16kit.service.config.resources import MEMORY_DIVISOR
from bf16kit.service.config.serverconfig import ServerConfig, explain
from bf16kit.service.contract import Bounds
from bf16kit.service.models.plan import DesiredModel, Plan
from bf16kit.service.shadow.referencememory import fp32_bytes


class Scaling(BaseModel):
    """How many processes there are, and their resources. Each field is an option, and its description the help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    min_replicas: int = Field(default=1, ge=1, description="Replicas of each model.")
    max_replicas: int | None = Field(default=None, ge=1, description="More than --min-replicas: autoscaled.")
    fronts: int = Field(default=1, ge=1, description="Processes that pass requests on to the replicas.")
    target: float = Field(default=16.0, gt=0, description="Requests in flight per replica to scale for.")
    queued: int = Field(default=256, ge=1, description="Requests that may wait in a front; more are rejected.")
    cpus: float = Field(default=1.0, gt=0, description="Processors and threads of a replica.")
    gpus: float = Field(default=0.0, ge=0, description="GPUs of a replica.")
    per_node: int = Field(default=0, ge=0, description="Most replicas of a model on one node; 0: as many as fit.")
    proxies: Literal["EveryNode", "HeadOnly"] = Field(default="EveryNode", description="Nodes with a proxy of Ray's.")

    @property
    def autoscaled(self) -> bool:
        return self.max_replicas is not None and self.max_replicas > self.min_replicas

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas is not None and self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; give 1 ≤ min ≤ max"
            )
        return self

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the scaling with these values. Raises ConfigError."""
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigError(explain(error.errors(), cls, "scaling")) from None


# Settings of one process that many replicas cannot have, each with the reason for users.
_NOT_HERE = {
    "workers": "Ray scales by replicas: set --min-replicas and --max-replicas",
    "tls_certificate": "Ray's gRPC proxy speaks no TLS: put a proxy that does in front",
    "shared_memory": "a replica may be on another machine than the client",
    "load_model": "every model of the repository is served",
    "max_in_flight": "set --target, which bounds the requests in a replica, and --queued, those that wait for one",
    "http_inference": "Ray's HTTP port has the front's pages only: use the gRPC port",
    "max_connection_age_seconds": "connections end at Ray's proxies, which have no such limit: leave it out",
}


def check(config: ServerConfig) -> ServerConfig:
    """Return ``config`` if replicas on many machines can be served with it. Raises :class:`ConfigError` otherwise."""
    for name, reason in _NOT_HERE.items():
        value = getattr(config, name)
        if value != ServerConfig.model_fields[name].default:
            raise ConfigError(f"{name} is {value}, which is not supported with Ray: {reason}")
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


MESSAGES_AT_ONCE = 8  # times max_message_bytes: what all requests and responses in flight may use at most
# Memory of a replica without a model, and of its second process, which runs the fp32 references: what their imports
# take, measured by tests/ray/test_placement.py, plus a margin.
PROCESS_BYTES = 320 << 20
REFERENCE_PROCESS_BYTES = 160 << 20
_AT_LOAD = 1.5  # times its weights: they are copied and packed for the kernel, and the golden samples run
_FP32_LOADED = 1.4  # times its fp32 weights: where no disk has room for them, loading a reference took up to 1.33
_REFERENCE_RUN_BYTES = 128 << 20  # eight rows at most, unless shadow.max_rows says otherwise


@dataclass(frozen=True, slots=True)
class Placement:
    """What one replica is started with, and the bytes that are reserved for it, of which its requests may use some."""

    memory: int
    request_bytes: int
    config: ServerConfig


def place(desired: DesiredModel, config: ServerConfig) -> Placement:
    """Return the place of a replica of ``desired``, from the sizes of its artifacts.

    The reservation is all that a replica has, as a container's limit is for a server. Limits that the operator set are
    reserved in full; those of requests follow from it otherwise.
    """
    base, measured = PROCESS_BYTES, False
    for plan in desired.plans:
        with suppress(ArtifactError):  # the replica will say what is wrong with it
            manifest = Artifact.open(Path(plan.path), verify=False).manifest
            base += _own_bytes(plan, manifest)
            if plan.serving.shadow.on and manifest.reference is not None:
                measured = True
                base += int(_FP32_LOADED * fp32_bytes(manifest)) + _REFERENCE_RUN_BYTES
    base += REFERENCE_PROCESS_BYTES if measured else 0
    share = base // (MEMORY_DIVISOR - 1)  # so that it is 1/MEMORY_DIVISOR of the total
    given = "max_message_bytes" in config.model_fields_set
    message = config.max_message_bytes if given else min(config.max_message_bytes, share)
    # A single request is accepted up to its size, whatever else is in use.
    requests = min(MESSAGES_AT_ONCE * message, max(share, message))
    return Placement(base + requests, requests, config.model_copy(update={"max_message_bytes": message}))


def _own_bytes(plan: Plan, manifest: Manifest) -> int:
    """Return the bytes that one version takes in its replica's process: weights, a batch's outputs, the fallback."""
    files = manifest.files.items()
    weights = sum(entry.bytes for name, entry in files if name.startswith("weights."))
    scripted = max((entry.bytes for name, entry in files if name.endswith((".pt", ".pt2"))), default=0)
    memory = int(_AT_LOAD * max(weights, scripted)) + Bounds().response_bytes // 8
    if plan.serving.fallback.policy == "fp32" and manifest.reference is not None:
        memory += int(_FP32_LOADED * fp32_bytes(manifest))
    return memory
