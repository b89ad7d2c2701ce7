"""A compose project of the test's own, and single containers of its images, on a real Docker engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("IMAGE", "bf16kit")
#: Services whose images are to be had wherever there is an engine; Grafana's is looked for.
SERVICES = ("convert", "server", "prometheus")
PORTS = ("GRPC_PORT", "HTTP_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``docker …``, whatever becomes of it."""
    return subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def told(done: subprocess.CompletedProcess[str]) -> str:
    """The standard output; the test fails with all that was written where the exit code is not 0."""
    if done.returncode != 0:
        pytest.fail(f"{done.args} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def have_image(name: str) -> bool:
    return docker("image", "inspect", name).returncode == 0


def free_ports(count: int) -> list[str]:
    """Ports of loopback that are free now. Not 0: what is restarted would get another one."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass(frozen=True)
class Stack:
    """A compose project: its name, its environment, and the files that it is made of."""

    project: str
    environment: Mapping[str, str]
    files: tuple[str, ...] = ("compose.yaml",)

    @classmethod
    def new(cls, project: str, **environment: str) -> Stack:
        """On free ports. Its server's log has a line for each request."""
        ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        return cls(project, {"IMAGE": IMAGE, "BF16KIT_LOG_LEVEL": "debug", **ports, **environment})

    def and_file(self, path: str | Path) -> Stack:
        """The same project with one more file over it."""
        return replace(self, files=(*self.files, str(path)))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``docker compose …`` for this project."""
        files = [word for file in self.files for word in ("--file", file)]
        command = ["docker", "compose", *files, "--project-name", self.project, "--progress", "quiet", *arguments]
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    def compose(self, *arguments: str) -> str:
        """The standard output of ``docker compose …``; the test fails, with what it wrote, when it does."""
        return told(self.run(*arguments))

    def up(self, *services: str) -> None:
        """Returns when what ``services`` depend on has happened: converted, then ready."""
        if self.run("up", "--detach", *services).returncode != 0:
            pytest.fail(f"the stack did not come up:\n{self.compose('logs', '--no-color')[-6000:]}")

    def python(self, script: str) -> str:
        """Run ``script`` where the models may be written to."""
        return self.compose("run", "--rm", "-T", "--no-deps", "--entrypoint", "python", "convert", "-c", script)

    def address(self, service: str, port: int) -> str:
        return self.compose("port", service, str(port))

    @property
    def target(self) -> str:
        """Where the server's gRPC port is."""
        return f"127.0.0.1:{self.environment['GRPC_PORT']}"

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container, also of one that has ended."""
        (found,) = json.loads(told(docker("inspect", self.compose("ps", "--all", "--quiet", service))))
        assert isinstance(found, dict)
        return found

    def health(self, service: str) -> str:
        return str(self.container(service)["State"]["Health"]["Status"])

    def log(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", service)

    def get(self, path: str) -> tuple[int, str]:
        """A page of the server's HTTP port; 0 where nobody answers."""
        return get(f"http://127.0.0.1:{self.environment['HTTP_PORT']}{path}")

    def ask(self, path: str, **parameters: str) -> Any:
        """What the HTTP API of the stack's Prometheus answers."""
        url = f"http://127.0.0.1:{self.environment['PROMETHEUS_PORT']}/api/v1/{path}?"
        with urllib.request.urlopen(url + urllib.parse.urlencode(parameters), timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, promql: str) -> list[float]:
        """The values of an instant query, one per series."""
        return [float(series["value"][1]) for series in self.ask("query", query=promql)["result"]]

    def firing(self) -> set[str]:
        """The alerts that fire now; none while nobody answers."""
        try:
            alerts = self.ask("alerts")["alerts"]
        except OSError:
            return set()
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "10")

    def left(self) -> str:
        """What of the project the engine still has."""
        label = f"label=com.docker.compose.project={self.project}"
        asked = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return "".join(told(docker(*words, "--quiet", "--filter", label)) for words in asked)


class Container:
    """A container of the server's image, alone and as hardened as the stack's; removed when the block is left."""

    def __init__(self, *arguments: str, options: tuple[str, ...] = ()) -> None:
        hardened = ("--read-only", "--tmpfs", "/tmp:size=256m", "--cap-drop", "ALL", "--pids-limit", "512")
        quick = ("--health-interval", "1s", "--health-start-period", "2s", "--health-retries", "2")
        self.id = told(docker("run", "--detach", *hardened, *quick, *options, f"{IMAGE}:server", *arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        docker("rm", "--force", "--volumes", self.id)

    @property
    def state(self) -> dict[str, Any]:
        found = json.loads(told(docker("inspect", "--format", "{{json .State}}", self.id)))
        assert isinstance(found, dict)
        return found

    @property
    def health(self) -> str:
        return str(self.state.get("Health", {}).get("Status", "none"))

    @property
    def log(self) -> str:
        done = docker("logs", self.id)
        return done.stdout + done.stderr


def get(url: str) -> tuple[int, str]:
    """Status and text of a page; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)
