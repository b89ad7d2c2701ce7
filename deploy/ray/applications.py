"""The applications that Ray runs: the front, and one for each model, with the resources of each replica.

`serve run` builds them too, by :func:`front` and :func:`model`, from the arguments in Ray's own configuration file:
`python -m deploy.ray --print-config` writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bf16kit.messages.errors import ConfigError
from deploy.ray.front import Front
from deploy.ray.replica import Replica
from deploy.ray.rpcs import FRONT, SERVICER_FUNCTION, application
from deploy.ray.settings import MESSAGES_AT_ONCE, Placement, Scaling, check, place
from ray import serve
from service.config.serverconfig import ServerConfig, explain
from service.models.directory import Directory
from service.models.plan import DesiredModel

LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_FRONT_BYTES = 256 << 20  # beside the requests that it passes on
_FRONT_CALLS = 4096
_PER_REPLICA = 4  # times the target: requests that one replica gets at most
_SURGE_PERCENT = 25  # of the replicas, rounded up: that many new ones are ready before as many old ones are stopped
_MAX_STARTS = 3  # to start a replica: a damaged artifact stays damaged
_ENVIRONMENT = {"env_vars": {"ORT_DISABLE_TELEMETRY": "1"}}


def front(arguments: Mapping[str, Any]) -> Any:
    """Return the front. ``config``: a server's, as JSON; ``scaling``: see :class:`Scaling`."""
    config, scaling = _config(arguments), Scaling.of(arguments.get("scaling", {}))
    request_bytes = MESSAGES_AT_ONCE * config.max_message_bytes
    memory = _FRONT_BYTES + request_bytes
    return serve.deployment(
        Front,
        name="Front",
        num_replicas=scaling.fronts,
        max_ongoing_requests=_FRONT_CALLS,
        ray_actor_options={"num_cpus": 0, "memory": memory, "runtime_env": _ENVIRONMENT},
        max_surge_percent=100,
        health_check_period_s=1,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=2,
    ).bind(as_json(config, scaling), request_bytes)


def model(arguments: Mapping[str, Any]) -> Any:
    """Return the application of one model.

    ``config`` and ``scaling`` are as for :func:`front`. Either ``desired`` has the versions to serve, or ``model`` is a
    name in the repository.
    """
    config, scaling = _config(arguments), Scaling.of(arguments.get("scaling", {}))
    if "desired" in arguments:
        desired = DesiredModel.from_json(arguments["desired"])
    else:
        desired = Directory(config.repository).desired_model(arguments["model"])
    return deployment(desired, place(desired, config), scaling)


def deployment(desired: DesiredModel, placed: Placement, scaling: Scaling) -> Any:
    """Return the deployment of one model: where replicas fit, and how many, by the number of requests in flight."""
    gpus = {"num_gpus": scaling.gpus} if scaling.gpus else {}
    number: dict[str, Any] = {"num_replicas": scaling.min_replicas}
    if scaling.max_replicas > scaling.min_replicas:
        bounds = {"min_replicas": scaling.min_replicas, "max_replicas": scaling.max_replicas}
        number = {"autoscaling_config": {**bounds, "target_ongoing_requests": scaling.target}}
    if scaling.per_node:
        number["max_replicas_per_node"] = scaling.per_node
    calls = max(1, round(_PER_REPLICA * scaling.target))
    options = {"num_cpus": scaling.cpus, "memory": placed.memory, "runtime_env": _ENVIRONMENT, **gpus}
    return serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=calls,
        max_queued_requests=scaling.queued,
        ray_actor_options=options,
        # With a limit per node there may be no node for an additional replica during an update.
        max_surge_percent=0 if scaling.per_node else _SURGE_PERCENT,
        health_check_period_s=2,
        health_check_timeout_s=10,
        max_constructor_retry_count=_MAX_STARTS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=placed.config.drain_seconds,
        **number,
    ).bind(as_json(placed.config, scaling), desired.to_json(), calls, placed.request_bytes)


def as_json(config: ServerConfig, scaling: Scaling) -> dict[str, Any]:
    """Return a server's configuration as JSON. A replica has as many threads as CPUs."""
    fields: dict[str, Any] = config.model_dump(mode="json")
    fields["repository"] = str(Path(config.repository).absolute())
    fields["threads"] = config.threads or max(1, int(scaling.cpus))
    return fields


def _config(arguments: Mapping[str, Any]) -> ServerConfig:
    """Return the configuration in ``arguments``, completed by defaults. Raises ConfigError."""
    try:
        return check(ServerConfig(**arguments.get("config", {})))
    except ValidationError as error:
        raise ConfigError(explain(error, ServerConfig, "config")) from None


def port_options(config: ServerConfig) -> dict[str, dict[str, Any]]:
    """Return the options of Ray's proxies, by the names that Ray's configuration and `serve.start` have for them."""
    functions = {"grpc_servicer_functions": [SERVICER_FUNCTION], "enable_reflection": True}
    return {
        "http_options": {"host": config.host, "port": config.http_port},
        "grpc_options": {"port": config.grpc_port, **functions},
        "logging_config": LOGGING,
    }


def ray_config(
    config: ServerConfig, scaling: Scaling, desired_models: Mapping[str, DesiredModel], location: str
) -> dict[str, Any]:
    """Return Ray Serve's own configuration of all applications: for `serve deploy`, or a RayService's serveConfigV2."""
    shared = {"config": as_json(config, scaling), "scaling": scaling.model_dump()}
    path = f"{__name__}:front"
    listed: list[dict[str, Any]] = [{"name": FRONT, "route_prefix": "/", "import_path": path, "args": shared}]
    for name, desired in desired_models.items():
        placed, path = place(desired, config), f"{__name__}:model"
        arguments = {**shared, "config": as_json(placed.config, scaling), "desired": desired.to_json()}
        listed.append({"name": application(name), "route_prefix": None, "import_path": path, "args": arguments})
    return {"proxy_location": location, **port_options(config), "applications": listed}
