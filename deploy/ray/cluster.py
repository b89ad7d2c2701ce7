"""Deploys the applications on Ray, now and whenever the repository changes."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import first_line
from bf16kit.system.rayaddress import check_reachable
from deploy.ray import applications
from deploy.ray.calls import FRONT, PROXY_SETTINGS, application
from deploy.ray.placement import place
from deploy.ray.settings import Scaling
from ray import serve
from ray.exceptions import RayError
from ray.serve.api import RunTarget
from ray.serve.exceptions import RayServeException
from service.config.ports import listen
from service.config.serverconfig import ENV_PREFIX, ServerConfig
from service.config.stop import Stop
from service.contract import State
from service.models.directory import Directory
from service.models.plan import DesiredModel
from service.models.retries import Retries
from service.workers.state import SlotState

_log = logging.getLogger(__name__)
_ADDRESS = "RAY_ADDRESS"  # Ray's own variable
_NEW_CLUSTER = "local"  # Ray's name for a new cluster
INGRESS = "deploy.ray.ingress.add_inference"
_LOG = {"log_level": "WARNING", "enable_access_log": False}
_ROOT = Path(__file__).parents[2]
_CHECK_SECONDS = 1.0
_REMOVED_CHECK_SECONDS = 0.2
_REMOVE_SECONDS = 15.0  # beyond the time that requests have to end, for Ray to stop the rest
# Ray restarts by itself what it has not given up; that counts as loading.
_STATES: Mapping[str, State] = {"RUNNING": "ready", "DEPLOY_FAILED": "unavailable"}
#: Ray's errors when the cluster does not do what it is asked.
FAILURES = (RayError, RayServeException, TimeoutError, ConnectionError)


def join(address: str | None, config: ServerConfig) -> None:
    """Join the cluster at ``address``, else the one at RAY_ADDRESS, else start one on this machine.

    Without an address Ray would join any cluster it finds. A new cluster has no dashboard and no usage statistics.
    Raises ConfigError if there is no such cluster.

    Ray's processes read the environment when they start, so the variables set here affect only a new cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(config.max_message_bytes))
    for key in PROXY_SETTINGS:
        os.environ.setdefault(f"{ENV_PREFIX}{key.upper()}", str(getattr(config, key)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    source = "--address" if address else _ADDRESS
    address = address or os.environ.get(_ADDRESS) or _NEW_CLUSTER
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
    elif _listens_here(location):
        for host, port, flag in (
            ("0.0.0.0", config.grpc_port, "--grpc-port"),  # noqa: S104 -- where Ray listens, whatever it is told
            (config.host, config.http_port, "--http-port"),
        ):
            listen(host, port, flag).close()
    serve.start(
        proxy_location=location,
        http_options={"host": config.host, "port": config.http_port},
        grpc_options={"port": config.grpc_port, "grpc_servicer_functions": [INGRESS], "enable_reflection": False},
        logging_config=_LOG,
    )


def _run(targets: list[RunTarget]) -> None:
    if targets:
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _fits_a_node(resources: Mapping[str, float]) -> bool:
    """Return whether some node has all these resources, in use or not."""
    return any(
        node["Alive"] and all(node["Resources"].get(name, 0.0) >= amount for name, amount in resources.items())
        for node in ray.nodes()
    )


def _listens_here(location: str) -> bool:
    """Return whether this machine belongs to the cluster and runs a proxy."""
    if ray.util.client.ray.is_connected():
        return False
    own = ray.get_runtime_context().get_node_id()
    return location == "EveryNode" or any(
        node["NodeID"] == own and "node:__internal_head__" in node["Resources"] for node in ray.nodes()
    )


class RepositoryDeployment:
    """The applications of one repository. :meth:`deploy_changes` deploys only what has changed since the last call."""

    def __init__(self, config: ServerConfig, scaling: Scaling) -> None:
        self._config = config
        self._scaling = scaling
        self._directory = Directory(config.repository)
        self._desired_models: dict[str, DesiredModel] | None = None
        self._notes: set[str] = set()
        self._slots: list[SlotState] = []
        self._retries = Retries(lambda: self._slots)

    @property
    def names(self) -> list[str]:
        """The names of the applications."""
        return [FRONT, *map(application, self._desired_models or ())]

    def deploy_changes(self) -> None:
        """Deploy and remove models as the repository changes; does not wait.

        Models load in parallel, and one that cannot be served does not delay the others.

        Raises ConfigError when the repository cannot be listed.
        """
        scan = self._directory.scan(self._desired_models)
        for note in sorted({*scan.notes} - self._notes):
            _log.warning("%s", note)
        self._notes = {*scan.notes}
        before = self._desired_models
        if before == scan.desired_models:
            return
        if not scan.desired_models:
            _log.warning("%s", self._directory.nothing_to_serve(self._config.model_control))
        if before is None:
            arguments = applications.all_arguments(self._config, self._scaling, scan.desired_models)[FRONT]
            _run([RunTarget(applications.front(arguments), FRONT, "/", _LOG)])
        self._deploy([desired for name, desired in scan.desired_models.items() if desired != (before or {}).get(name)])
        for name in sorted((before or {}).keys() - scan.desired_models.keys()):
            _log.info("model %r: removed", name)
            serve.delete(application(name), _blocking=False)
        self._desired_models = scan.desired_models  # only now: after an error, the next call deploys it again

    def _deploy(self, desired_models: Sequence[DesiredModel]) -> None:
        arguments = applications.all_arguments(
            self._config, self._scaling, {desired.name: desired for desired in desired_models}
        )
        targets = []
        for desired in desired_models:
            app = application(desired.name)
            _log.info("model %r: deploying version %s", desired.name, ", ".join(map(str, sorted(desired.versions))))
            targets.append(RunTarget(applications.model(arguments[app]), app, applications.route(app), _LOG))
            resources = self._scaling.resources(place(desired, self._config).memory)
            if not _fits_a_node(resources):
                _log.warning(
                    "model %r: no node of the cluster has the resources of a replica, %s; waiting for one that has",
                    desired.name,
                    ", ".join(f"{amount:,.10g} {name}" for name, amount in resources.items()),
                )
        _run(targets)

    def retry(self, states: Mapping[str, str]) -> None:
        """Deploy again what Ray has given up, at increasing intervals, because the cause may have passed.

        ``states`` are those of :meth:`states`.
        """
        self._slots = [
            SlotState(name, version, _STATES.get(states[application(name)], "loading"))
            for name, desired in (self._desired_models or {}).items()
            for version in desired.versions
        ]
        self._deploy(self._retries.due(self._desired_models or {}))

    def resend_models(self) -> None:
        """Tell the front which models there are; a restarted front knows only those of its start."""
        models = {name: sorted(desired.versions) for name, desired in (self._desired_models or {}).items()}
        serve.get_app_handle(FRONT).set_models.remote(models)

    def states(self) -> dict[str, str]:
        """Return Ray's state of each application, by its name: RUNNING, DEPLOYING, UNHEALTHY and so on."""
        found = serve.status().applications
        return {name: str(found[name].status.value) if name in found else "NOT_STARTED" for name in self.names}

    def remove(self) -> None:
        """Remove these applications, and no others.

        They are not ready for ``lame_duck_seconds``; then all models are removed in parallel, once their requests have
        ended.
        """
        with contextlib.suppress(*FAILURES):  # it may be gone already
            serve.get_app_handle(FRONT).retire.remote()
        time.sleep(self._config.lame_duck_seconds)  # a second signal ends the program at once
        front, *models = self.names
        for some in (models, [front]):
            for name in some:
                serve.delete(name, _blocking=False)
            self._wait_until_removed(some)

    def _wait_until_removed(self, names: list[str]) -> None:
        until = time.monotonic() + self._config.drain_seconds + _REMOVE_SECONDS
        while left := sorted(serve.status().applications.keys() & set(names)):
            if time.monotonic() > until:
                _log.warning("not removed in time: %s; Ray continues to remove it", ", ".join(left))
                return
            time.sleep(_REMOVED_CHECK_SECONDS)


def follow(deployed: RepositoryDeployment, config: ServerConfig, stop: Stop) -> None:
    """Log the applications' states until ``stop`` and, with ``model_control: poll``, follow the repository."""
    logged: dict[str, str] = {}
    until_poll = config.poll_seconds
    while not stop.wait(_CHECK_SECONDS):
        until_poll -= _CHECK_SECONDS
        try:
            if config.model_control == "poll" and until_poll <= 0:
                until_poll = config.poll_seconds
                deployed.deploy_changes()
            deployed.resend_models()
            now = deployed.states()
            deployed.retry(now)
        except Exception as error:  # noqa: BLE001 -- of the cluster or a file system; what serves goes on serving
            _log.warning("looking at the cluster and the repository failed; it will run again: %s", first_line(error))
            continue
        for name, state in now.items():
            if logged.get(name) != state:
                _log.info("%s: %s", name, state)
        logged = now


def as_config(
    config: ServerConfig, scaling: Scaling, desired_models: dict[str, DesiredModel], location: str
) -> dict[str, Any]:
    """Return Ray Serve's own configuration of all applications, as for ``serve deploy``.

    It is also the ``serveConfigV2`` of a RayService.
    """
    listed = []
    for name, arguments in applications.all_arguments(config, scaling, desired_models).items():
        function, route = ("front", "/") if name == FRONT else ("model", applications.route(name))
        path = f"deploy.ray.applications:{function}"
        listed.append({"name": name, "route_prefix": route, "import_path": path, "args": arguments})
    return {
        "proxy_location": location,
        "http_options": {"host": config.host, "port": config.http_port},
        "grpc_options": {"port": config.grpc_port, "grpc_servicer_functions": [INGRESS], "enable_reflection": False},
        "logging_config": _LOG,
        "applications": listed,
    }
