"""What Ray runs: the front, and an application for each model, now and whenever the repository changes."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from bf16kit.deploy.ray.front import CALLS, Front
from bf16kit.deploy.ray.models import RAY_ERRORS, State
from bf16kit.deploy.ray.replica import Replica
from bf16kit.deploy.ray.rpcs import FRONT, SERVICER_FUNCTION, application
from bf16kit.deploy.ray.settings import MESSAGES_AT_ONCE, Scaling, place
from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import first_line
from bf16kit.service.config.loops import Stop
from bf16kit.service.config.ports import listen
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.models.plan import DesiredModel, Directory
from bf16kit.system.rayaddress import check_reachable
from ray import serve

_log = logging.getLogger(__name__)
_NEW_CLUSTER = "local"  # Ray's name for a new cluster
_ROOT = Path(__file__).parents[3]
_CHECK_SECONDS = 1.0
_RETIRE_SECONDS = 5.0
_DELETED_AT_ONCE = 64
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 30.0, 3600.0
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_FRONT_BYTES = 256 << 20  # beside the requests that it passes on
_PER_REPLICA = 4  # times the target: requests that one replica gets at most
_SURGE_PERCENT = 25  # of the replicas, rounded up: that many new ones are ready before as many old ones are stopped
_MAX_STARTS = 3  # to start a replica: a damaged artifact stays damaged
_ENVIRONMENT = {"env_vars": {"ORT_DISABLE_TELEMETRY": "1"}}


def join(address: str | None, config: ServerConfig, proxies: str) -> None:
    """Join the cluster at ``address``, else the one at RAY_ADDRESS, else start one; start Ray's ``proxies`` there.

    Without an address Ray would join any cluster it finds. A new cluster has no dashboard and no usage statistics. Its
    processes read the environment when they start. Raises ConfigError if there is no such cluster, or for a port of
    this machine that is taken: Ray would retry it for minutes, or share it with another cluster's proxies.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(config.max_message_bytes))
    # Ray kills a proxy that is not ready in the third of these periods, and its 5 s are too few for a busy machine.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    source = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or _NEW_CLUSTER
    if address == _NEW_CLUSTER:  # before it starts, which takes seconds
        _check_ports(config)
    try:
        check_reachable(address)
        ray.init(address=address, include_dashboard=False if address == _NEW_CLUSTER else None, logging_level="WARNING")
    except (OSError, ValueError, RuntimeError) as error:
        if address == _NEW_CLUSTER:
            raise ConfigError(f"no Ray cluster starts on this machine: {first_line(error)}") from None
        raise ConfigError(f"{source} {address}: no Ray cluster is reached: {first_line(error)}") from None
    if serve.status().proxies:
        _log.warning("Ray Serve runs in this cluster already: its ports stay those that it was started with")
    elif not address.startswith("ray://"):  # else this machine does not belong to the cluster
        _check_ports(config)
    functions = {"grpc_servicer_functions": [SERVICER_FUNCTION], "enable_reflection": True}
    with _going_on_without_proxies():
        serve.start(
            proxy_location=proxies,
            http_options={"host": config.host, "port": config.http_port},
            grpc_options={"port": config.grpc_port, **functions},
            logging_config=_LOGGING,
        )


def _check_ports(config: ServerConfig) -> None:
    for host, port, flag in (
        ("0.0.0.0", config.grpc_port, "--grpc-port"),  # noqa: S104 -- where Ray listens, whatever it is told
        (config.host, config.http_port, "--http-port"),
    ):
        listen(host, port, flag).close()


def front_target(config: ServerConfig, scaling: Scaling) -> serve.RunTarget:
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
    return serve.RunTarget(deployment.bind(config, request_bytes), FRONT, "/", _LOGGING)


def model_target(desired: DesiredModel, config: ServerConfig, scaling: Scaling) -> serve.RunTarget:
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
    return serve.RunTarget(bound, application(desired.name), None, _LOGGING)


class RepositoryDeployment:
    """The applications of one repository. :meth:`deploy_changes` deploys only what has changed since the last call."""

    def __init__(self, config: ServerConfig, scaling: Scaling) -> None:
        self._config = config.model_copy(update={"repository": config.repository.absolute()})
        self._scaling = scaling
        self._directory = Directory(self._config.repository)
        self._desired_models: dict[str, DesiredModel] | None = None
        self._notes: set[str] = set()
        self._retries: dict[str, tuple[float, float]] = {}  # when models that failed are due again, and the next pause

    def deploy_changes(self) -> None:
        """Deploy and remove models as the repository changes; waits only for removals.

        Models load in parallel, and one that cannot be served does not delay the others. Raises ConfigError when the
        repository cannot be listed.
        """
        scan, before = self._directory.scan(self._desired_models), self._desired_models
        for note in sorted({*scan.notes} - self._notes):
            _log.warning("%s", note)
        self._notes = {*scan.notes}
        if before == scan.desired_models:
            return
        if not scan.desired_models:
            _log.warning("%s", self._directory.nothing_to_serve(self._config.model_control))
        if before is None:
            _run(front_target(self._config, self._scaling))
            before = {}
        kept = {name for name, each in scan.desired_models.items() if each == before.get(name)}
        self._retries = {name: retry for name, retry in self._retries.items() if name in kept}
        self._deploy(each for name, each in scan.desired_models.items() if name not in kept)
        for name in (gone := sorted(before.keys() - scan.desired_models.keys())):
            _log.info("model %r: removed", name)
        self._delete(map(application, gone))
        self._desired_models = scan.desired_models  # only now: after an error, the next call deploys it again

    def _deploy(self, desired_models: Iterable[DesiredModel]) -> None:
        targets = []
        for desired in desired_models:
            _log.info("model %r: deploying version %s", desired.name, ", ".join(map(str, sorted(desired.versions))))
            targets.append(model_target(desired, self._config, self._scaling))
        _run(*targets)

    def _delete(self, names: Iterable[str]) -> None:
        """Remove applications in parallel, each once its requests have ended."""
        with ThreadPoolExecutor(_DELETED_AT_ONCE) as pool:
            list(pool.map(self._delete_one, names))

    def _delete_one(self, name: str) -> None:
        until = time.monotonic() + self._config.drain_seconds
        while True:
            with contextlib.suppress(TimeoutError):  # Ray waits for a minute
                serve.delete(name)
                return
            if time.monotonic() > until:
                _log.warning("%s is not removed in time; Ray continues to remove it", name)
                return

    def states(self) -> dict[str, State]:
        """Return Ray's state of each application, by its name."""
        found = serve.status().applications
        names = (FRONT, *map(application, self._desired_models or ()))
        return {name: State.of(found[name]) if name in found else State("NOT_STARTED", "") for name in names}

    def retry(self, states: Mapping[str, State]) -> None:
        """Deploy again what Ray has given up, at increasing intervals, because the cause may have passed."""
        now = time.monotonic()
        for name, desired in (self._desired_models or {}).items():
            status = states[application(name)].status
            if status == "RUNNING":
                self._retries.pop(name, None)
            if status != "DEPLOY_FAILED":
                continue
            due, pause = self._retries.setdefault(name, (now + _FIRST_RETRY_SECONDS, _FIRST_RETRY_SECONDS))
            if now >= due:
                pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
                self._retries[name] = now + pause, pause
                self._deploy([desired])

    def follow(self, stop: Stop) -> None:
        """Log the applications' states until ``stop`` and, with ``model_control: poll``, follow the repository."""
        logged: dict[str, State] = {}
        until_poll = self._config.poll_seconds
        while not stop.wait(_CHECK_SECONDS):
            until_poll -= _CHECK_SECONDS
            try:
                if self._config.model_control == "poll" and until_poll <= 0:
                    until_poll = self._config.poll_seconds
                    self.deploy_changes()
                now = self.states()
                self.retry(now)
            except Exception as error:  # noqa: BLE001 -- of the cluster or a file system; what serves goes on serving
                _log.warning("looking at the cluster and the repository failed; trying again: %s", first_line(error))
                continue
            for name, state in now.items():
                if logged.get(name) != state:
                    _log.info("%s: %s%s", name, state.status, f": {state.message}" if state.message else "")
            logged = now

    def remove(self) -> None:
        """Remove these applications, and no others.

        They are not ready for ``lame_duck_seconds``; then all models are removed, and the front after them.
        """
        with contextlib.suppress(*RAY_ERRORS):  # it may be gone already
            serve.get_app_handle(FRONT).broadcast("retire").results(timeout_s=_RETIRE_SECONDS)
        time.sleep(self._config.lame_duck_seconds)  # a second signal ends the program at once
        self._delete(map(application, self._desired_models or ()))
        self._delete([FRONT])


def _run(*targets: serve.RunTarget) -> None:
    if targets:
        with _going_on_without_proxies():
            serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


@contextlib.contextmanager
def _going_on_without_proxies() -> Iterator[None]:
    """Log that proxies are late: Ray waits a minute, too little on a busy machine. Its controller still starts them."""
    try:
        yield
    except TimeoutError as error:
        _log.warning("Ray is still starting its proxies: %s", first_line(error))
