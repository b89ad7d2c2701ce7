"""The applications that Ray runs: the front, and one for each model, with the resources of each replica.

``serve run deploy.ray.applications:front`` and ``…:model`` build them too, from the arguments in Ray's own
configuration file: `python -m deploy.ray --print-config` writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bf16kit.messages.errors import ConfigError
from deploy.ray.calls import FRONT, application
from deploy.ray.front import Front
from deploy.ray.placement import Placement, place
from deploy.ray.replica import Replica
from deploy.ray.settings import Scaling, check
from ray import serve
from service.config.resources import MEMORY_DIVISOR
from service.config.serverconfig import ServerConfig, explain
from service.models.directory import Directory
from service.models.plan import DesiredModel

_FRONT_MEMORY = 256 << 20
_FRONT_CALLS = 4096  # health watches last as long as their clients, and each replica waits for a reply
_PER_REPLICA = 4  # times the target: requests that one replica gets at most
_SURGE_PERCENT = 25  # of the replicas, rounded up: that many new ones are ready before as many old ones are stopped
_MAX_STARTS = 3  # to start a replica: a damaged artifact stays damaged
_ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1"}


def front(arguments: Mapping[str, Any]) -> Any:
    """Return the front. ``config``: a server's, as JSON; ``models``: versions by name."""
    options = {"num_cpus": 0, "memory": _FRONT_MEMORY, "runtime_env": {"env_vars": _ENVIRONMENT}}
    deployed = serve.deployment(
        Front,
        name="Front",
        num_replicas=1,
        max_ongoing_requests=_FRONT_CALLS,
        ray_actor_options=options,
        max_surge_percent=100,
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=2,
    )
    config = _config(arguments)  # the front gets requests for models that do not exist, of any size
    config = config.model_copy(
        update={"max_request_bytes": min(config.max_request_bytes, _FRONT_MEMORY // MEMORY_DIVISOR)}
    )
    return deployed.bind(config_as_json(config, 1.0), dict(arguments.get("models", {})))


def model(arguments: Mapping[str, Any]) -> Any:
    """Return the application of one model.

    ``config``: a server's, as JSON; ``scaling``: see :class:`Scaling`; and either ``wish``, the versions to serve, or
    ``model``, a name in the repository.
    """
    config, scaling = _config(arguments), Scaling.from_json(dict(arguments.get("scaling", {})))
    placed = place(_desired(arguments, config), config)
    return deployment(placed, scaling).bind(config_as_json(placed.config, scaling.cpus), placed.desired.to_json())


def deployment(placed: Placement, scaling: Scaling) -> Any:
    """Return the deployment of one model: where replicas fit, and how many, by the number of requests in flight."""
    options: dict[str, Any] = {
        "num_cpus": scaling.cpus,
        "memory": placed.memory,
        "runtime_env": {"env_vars": _ENVIRONMENT},
    }
    if scaling.gpus:
        options["num_gpus"] = scaling.gpus
    many = scaling.max_replicas > scaling.min_replicas
    number: dict[str, Any] = {"num_replicas": scaling.min_replicas}
    if many:
        number = {
            "autoscaling_config": {
                "min_replicas": scaling.min_replicas,
                "max_replicas": scaling.max_replicas,
                "target_ongoing_requests": scaling.target,
            }
        }
    if scaling.per_node:  # then there may be no node for an additional replica during an update
        number["max_replicas_per_node"] = scaling.per_node
    return serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=max(1, round(_PER_REPLICA * scaling.target)),
        max_queued_requests=scaling.queued,
        ray_actor_options=options,
        max_surge_percent=0 if scaling.per_node else _SURGE_PERCENT,
        health_check_period_s=2,
        health_check_timeout_s=10,
        max_constructor_retry_count=_MAX_STARTS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=placed.config.drain_seconds,
        **number,
    )


def config_as_json(config: ServerConfig, cpus: float) -> dict[str, Any]:
    """Return a server's configuration as JSON. A replica has as many threads as CPUs."""
    fields: dict[str, Any] = config.model_dump(mode="json")
    fields["repository"] = str(Path(config.repository).absolute())
    fields["threads"] = config.threads or max(1, int(cpus))
    return fields


def _config(arguments: Mapping[str, Any]) -> ServerConfig:
    """Return the configuration in ``arguments``, completed by defaults. Raises ConfigError."""
    try:
        return check(ServerConfig(**arguments.get("config", {})))
    except ValidationError as error:
        raise ConfigError(explain(error, ServerConfig, "config")) from None


def _desired(arguments: Mapping[str, Any], config: ServerConfig) -> DesiredModel:
    if "wish" in arguments:
        return DesiredModel.from_json(arguments["wish"])
    return Directory(config.repository).desired_model(arguments["model"])


def all_arguments(
    config: ServerConfig, scaling: Scaling, desired_models: Mapping[str, DesiredModel]
) -> dict[str, dict[str, Any]]:
    """Return the arguments of every application, by its name, the front's first."""
    models = {name: sorted(desired.versions) for name, desired in desired_models.items()}
    found: dict[str, dict[str, Any]] = {FRONT: {"config": config_as_json(config, scaling.cpus), "models": models}}
    for name, desired in desired_models.items():
        placed = place(desired, config)
        found[application(name)] = {
            "config": config_as_json(placed.config, scaling.cpus),
            "scaling": scaling.as_json(),
            "wish": placed.desired.to_json(),
        }
    return found


def route(name: str) -> str:
    """Return the HTTP path of an application; a model has no pages there.

    Ray's gRPC proxy knows only applications that have such a path.
    """
    return f"/-/{name}"
