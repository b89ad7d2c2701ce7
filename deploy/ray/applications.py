"""The applications that Ray runs: the front, and one for each model, with the resources of each replica."""

from __future__ import annotations

from typing import Any

from deploy.ray.front import CALLS, Front
from deploy.ray.replica import Replica
from deploy.ray.rpcs import FRONT, application
from deploy.ray.settings import MESSAGES_AT_ONCE, Scaling, place
from ray import serve
from service.config.serverconfig import ServerConfig
from service.models.plan import DesiredModel

LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_FRONT_BYTES = 256 << 20  # beside the requests that it passes on
_PER_REPLICA = 4  # times the target: requests that one replica gets at most
_SURGE_PERCENT = 25  # of the replicas, rounded up: that many new ones are ready before as many old ones are stopped
_MAX_STARTS = 3  # to start a replica: a damaged artifact stays damaged
_ENVIRONMENT = {"env_vars": {"ORT_DISABLE_TELEMETRY": "1"}}


def front(config: ServerConfig, scaling: Scaling) -> serve.RunTarget:
    """Return the front, the only application with a route."""
    request_bytes = MESSAGES_AT_ONCE * config.max_message_bytes
    options = {"num_cpus": 0, "memory": _FRONT_BYTES + request_bytes, "runtime_env": _ENVIRONMENT}
    deployment = serve.deployment(
        Front,
        name="Front",
        num_replicas=scaling.fronts,
        max_ongoing_requests=CALLS,
        ray_actor_options=options,
        max_surge_percent=100,
        health_check_period_s=1,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=2,
    )
    return serve.RunTarget(deployment.bind(config, request_bytes), FRONT, "/", LOGGING)


def model(desired: DesiredModel, config: ServerConfig, scaling: Scaling) -> serve.RunTarget:
    """Return one model's application: where replicas fit, and how many, by the number of requests in flight."""
    placed = place(desired, config)
    number: dict[str, Any] = {"num_replicas": scaling.min_replicas}
    if scaling.autoscaled:
        bounds = {"min_replicas": scaling.min_replicas, "max_replicas": scaling.max_replicas}
        number = {"autoscaling_config": {**bounds, "target_ongoing_requests": scaling.target}}
    if scaling.per_node:
        number["max_replicas_per_node"] = scaling.per_node
    calls = max(1, round(_PER_REPLICA * scaling.target))
    options: dict[str, Any] = {"num_cpus": scaling.cpus, "memory": placed.memory, "runtime_env": _ENVIRONMENT}
    if scaling.gpus:
        options["num_gpus"] = scaling.gpus
    deployment = serve.deployment(
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
        graceful_shutdown_timeout_s=config.drain_seconds,
        **number,
    )
    threads = config.threads or max(1, int(scaling.cpus))
    bound = deployment.bind(placed.config.model_copy(update={"threads": threads}), desired, calls, placed.request_bytes)
    return serve.RunTarget(bound, application(desired.name), None, LOGGING)
