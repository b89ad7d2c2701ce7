"""Deploys the applications on Ray, now and whenever the repository changes."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ray
from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import first_line
from bf16kit.system.rayaddress import check_reachable
from deploy.ray import applications
from deploy.ray.models import brief_message
from deploy.ray.rpcs import FRONT, application
from deploy.ray.settings import Scaling, place
from ray import serve
from ray.exceptions import RayError
from ray.serve.api import RunTarget
from ray.serve.exceptions import RayServeException
from service.config.ports import listen
from service.config.serverconfig import ServerConfig
from service.config.stop import Stop
from service.models.directory import Directory
from service.models.plan import DesiredModel

_log = logging.getLogger(__name__)
_NEW_CLUSTER = "local"  # Ray's name for a new cluster
_ROOT = Path(__file__).parents[2]
_CHECK_SECONDS = 1.0
_REMOVED_CHECK_SECONDS = 0.2
_REMOVE_SECONDS = 15.0  # beyond the time that requests have to end, for Ray to stop the rest
_RETIRE_SECONDS = 5.0
_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 30.0, 3600.0
#: Ray's errors when the cluster does not do what it is asked.
FAILURES = (RayError, RayServeException, TimeoutError, ConnectionError)


def join(address: str | None, config: ServerConfig) -> None:
    """Join the cluster at ``address``, else the one at RAY_ADDRESS, else start one on this machine.

    Without an address Ray would join any cluster it finds. A new cluster has no dashboard and no usage statistics. Its
    processes read the environment when they start. Raises ConfigError if there is no such cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(config.max_message_bytes))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    source = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or _NEW_CLUSTER
    try:
        check_reachable(address)
        ray.init(address=address, include_dashboard=False if address == _NEW_CLUSTER else None, logging_level="WARNING")
    except (OSError, ValueError, RuntimeError) as error:
        if address == _NEW_CLUSTER:
            raise ConfigError(f"no Ray cluster starts on this machine: {first_line(error)}") from None
        raise ConfigError(f"{source} {address}: no Ray cluster is reached: {first_line(error)}") from None


def open_ports(config: ServerConfig, location: str) -> None:
    """Start Ray's proxies, unless they run: then their ports stay as they are.

    Raises ConfigError for a port of this machine that is taken. Ray would retry it for minutes, or share it with
    another cluster's proxies.
    """
    if serve.status().proxies:
        _log.warning("Ray Serve runs in this cluster already: its ports stay those that it was started with")
    elif not ray.util.client.ray.is_connected():  # else this machine does not belong to the cluster
        for host, port, flag in (
            ("0.0.0.0", config.grpc_port, "--grpc-port"),  # noqa: S104 -- where Ray listens, whatever it is told
            (config.host, config.http_port, "--http-port"),
        ):
            listen(host, port, flag).close()
    serve.start(proxy_location=location, **applications.port_options(config))


class State(NamedTuple):
    """Ray's state of an application: RUNNING, DEPLOYING, UNHEALTHY and so on, and what Ray says about it."""

    status: str
    message: str


class RepositoryDeployment:
    """The applications of one repository. :meth:`deploy_changes` deploys only what has changed since the last call."""

    def __init__(self, config: ServerConfig, scaling: Scaling) -> None:
        self._config = config
        self._scaling = scaling
        self._directory = Directory(config.repository)
        self._desired_models: dict[str, DesiredModel] | None = None
        self._notes: set[str] = set()
        self._retries: dict[str, tuple[float, float]] = {}  # when models that failed are due again, and the next pause

    def deploy_changes(self) -> None:
        """Deploy and remove models as the repository changes; does not wait.

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
            shared = {
                "config": applications.as_json(self._config, self._scaling),
                "scaling": self._scaling.model_dump(),
            }
            _run([RunTarget(applications.front(shared), FRONT, "/", applications.LOGGING)])
        self._deploy(*(each for name, each in scan.desired_models.items() if each != (before or {}).get(name)))
        for name in sorted((before or {}).keys() - scan.desired_models.keys()):
            _log.info("model %r: removed", name)
            serve.delete(application(name), _blocking=False)
        self._desired_models = scan.desired_models  # only now: after an error, the next call deploys it again

    def _deploy(self, *desired_models: DesiredModel) -> None:
        targets = []
        for desired in desired_models:
            _log.info("model %r: deploying version %s", desired.name, ", ".join(map(str, sorted(desired.versions))))
            deployed = applications.deployment(desired, place(desired, self._config), self._scaling)
            targets.append(RunTarget(deployed, application(desired.name), None, applications.LOGGING))
        _run(targets)

    def retry(self, states: Mapping[str, State]) -> None:
        """Deploy again what Ray has given up, at increasing intervals, because the cause may have passed.

        ``states`` are those of :meth:`states`.
        """
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
                self._deploy(desired)

    def states(self) -> dict[str, State]:
        """Return Ray's state of each application, by its name."""
        found, states = serve.status().applications, {}
        for name in (FRONT, *map(application, self._desired_models or ())):
            states[name] = State("NOT_STARTED", "")
            if name in found:
                states[name] = State(str(found[name].status.value), brief_message(found[name]))
        return states

    def remove(self) -> None:
        """Remove these applications, and no others.

        They are not ready for ``lame_duck_seconds``; then all models are removed in parallel, once their requests have
        ended, and the front after them.
        """
        with contextlib.suppress(*FAILURES):  # it may be gone already
            serve.get_app_handle(FRONT).broadcast("retire").results(timeout_s=_RETIRE_SECONDS)
        time.sleep(self._config.lame_duck_seconds)  # a second signal ends the program at once
        for names in (list(map(application, self._desired_models or ())), [FRONT]):
            for name in names:
                serve.delete(name, _blocking=False)
            until = time.monotonic() + self._config.drain_seconds + _REMOVE_SECONDS
            while left := sorted(serve.status().applications.keys() & set(names)):
                if time.monotonic() > until:
                    _log.warning("not removed in time: %s; Ray continues to remove it", ", ".join(left))
                    break
                time.sleep(_REMOVED_CHECK_SECONDS)


def _run(targets: list[RunTarget]) -> None:
    if targets:
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def follow(deployed: RepositoryDeployment, config: ServerConfig, stop: Stop) -> None:
    """Log the applications' states until ``stop`` and, with ``model_control: poll``, follow the repository."""
    logged: dict[str, State] = {}
    until_poll = config.poll_seconds
    while not stop.wait(_CHECK_SECONDS):
        until_poll -= _CHECK_SECONDS
        try:
            if config.model_control == "poll" and until_poll <= 0:
                until_poll = config.poll_seconds
                deployed.deploy_changes()
            now = deployed.states()
            deployed.retry(now)
        except Exception as error:  # noqa: BLE001 -- of the cluster or a file system; what serves goes on serving
            _log.warning("looking at the cluster and the repository failed; it will run again: %s", first_line(error))
            continue
        for name, state in now.items():
            if logged.get(name) != state:
                _log.info("%s: %s%s", name, state.status, f": {state.message}" if state.message else "")
        logged = now
