"""Check compose.yaml and compose.gpu.yaml without a Docker engine: what must hold for each service."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bf16kit.service.config.serverconfig import ENV_PREFIX, ServerConfig

pytestmark = pytest.mark.manifests
ROOT = Path(__file__).parents[2]
SCHEMA_CHECK = ROOT / "build" / "environments" / "compose-schema" / "bin" / "check-jsonschema"
GRAFANA = ROOT / "deploy" / "grafana"
_DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")
_VARIABLE = re.compile(r"\$\{(\w+)")


def read(name: str) -> dict[str, Any]:
    """Return the file, with each variable replaced by its default."""
    text = _DEFAULT.sub(lambda found: found[1], (ROOT / name).read_text("utf-8"))
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


COMPOSE, GPU = read("compose.yaml"), read("compose.gpu.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]


def _bytes(text: str) -> int:
    return int(text[:-1]) << {"m": 20, "g": 30}[text[-1]]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_is_hardened_and_bounded_and_its_log_rotates(name: str) -> None:
    """A user, capabilities, devices, the host's network or its processes would each need another key."""
    service = SERVICES[name]
    usual = {"image", "build", "entrypoint", "command", "environment", "volumes", "depends_on", "healthcheck", "deploy"}
    usual |= {"restart", "stop_grace_period", "read_only", "cap_drop", "security_opt", "tmpfs", "logging"}
    assert service.keys() <= usual | ({"network_mode"} if name == "convert" else {"networks", "ports"})
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    mounts = [mount for mount in service.get("volumes", ()) if not re.match(r"\w+:", mount)]
    assert [mount for mount in mounts if not mount.endswith(":ro")] == [], "mounts from the host are read-only"
    limits = service["deploy"]["resources"]["limits"]
    assert float(limits["cpus"]) > 0
    assert limits["pids"] > 0
    sizes = [re.search(r"size=(\w+)", mount) for mount in service["tmpfs"]]
    assert all(size is not None and _bytes(size[1]) < _bytes(limits["memory"]) for size in sizes)
    assert service["logging"] == {"driver": "local", "options": {"max-size": "10m", "max-file": "3"}}


@pytest.mark.parametrize("name", sorted(SERVICES.keys() - {"convert"}))
def test_a_permanent_service_restarts_and_publishes_ports_on_localhost_only(name: str) -> None:
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert SERVICES[name]["ports"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


def test_prometheus_retention_is_limited_in_time_and_size() -> None:
    flags = dict(flag.removeprefix("--").split("=") for flag in SERVICES["prometheus"]["command"])
    assert flags["storage.tsdb.retention.time"] == "7d"  # an alert looks three days back
    assert flags["storage.tsdb.retention.size"] == "1GB"


def test_pulled_images_have_an_exact_version() -> None:
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"])


@pytest.mark.parametrize("variables", [SERVICES["server"]["environment"], GPU["services"]["server"]["environment"]])
def test_the_servers_variables_are_settings_that_exist(variables: dict[str, str]) -> None:
    """The server would silently ignore an unknown variable."""
    given = {key.removeprefix(ENV_PREFIX).lower(): value for key, value in variables.items()}
    assert given.keys() <= ServerConfig.model_fields.keys()
    ServerConfig.model_validate({"repository": "/models", **given})


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_each_server_setting_comes_from_a_host_variable_of_the_same_name(name: str) -> None:
    """A ``LOG_LEVEL`` that a shell sets for other programs may have a value that this server rejects."""
    raw = yaml.safe_load((ROOT / name).read_text("utf-8"))["services"]["server"]["environment"]
    read_from = {name: _VARIABLE.findall(value) for name, value in raw.items() if "${" in value}
    assert read_from
    assert read_from == {name: [name] for name in read_from}


def test_the_documentation_lists_exactly_the_variables_that_the_files_read() -> None:
    read_there = {
        name
        for file in ("compose.yaml", "compose.gpu.yaml")
        for name in _VARIABLE.findall((ROOT / file).read_text("utf-8"))
    }
    section = (ROOT / "docs/deployment.md").read_text("utf-8").split("### What can be set\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    assert read_there == set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_docker_waits_longer_than_the_server_drains() -> None:
    drain = ServerConfig.model_fields["drain_seconds"].default
    assert int(SERVICES["server"]["stop_grace_period"].removesuffix("s")) > drain


def test_grafana_is_read_only_for_anonymous_users_and_has_no_login() -> None:
    settings = SERVICES["grafana"]["environment"]
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
    assert not [key for key in settings if "PASSWORD" in key or "INSTALL_PLUGINS" in key]


def test_grafana_is_provisioned_with_the_stacks_prometheus_and_the_dashboard() -> None:
    """The mounted files exist, and the provisioning files name the paths at which they are mounted."""
    mounts = dict(mount.removesuffix(":ro").split(":") for mount in SERVICES["grafana"]["volumes"])
    assert all((ROOT / source).exists() for source in mounts)
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text("utf-8"))["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    board = json.loads((GRAFANA / "bf16kit.json").read_text("utf-8"))  # its variable selects a source by type
    assert [each["query"] for each in board["templating"]["list"] if each["type"] == "datasource"] == ["prometheus"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/bf16kit.yml").read_text("utf-8"))["providers"]
    assert mounts["./deploy/grafana/bf16kit.json"] == f"{provider['options']['path']}/bf16kit.json"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == mounts["./deploy/grafana/bf16kit.json"]
    shared = set(SERVICES["grafana"]["networks"]) & set(SERVICES["prometheus"]["networks"])
    assert shared
    assert not set(SERVICES["grafana"]["networks"]) & set(SERVICES["server"]["networks"])


@pytest.mark.skipif(not SCHEMA_CHECK.exists(), reason="check-jsonschema is not there (make test-deploy fetches it)")
@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_a_file_is_valid_by_the_compose_schema(name: str) -> None:
    command = [str(SCHEMA_CHECK), "--builtin-schema", "vendor.compose-spec", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def has_compose() -> bool:
    return shutil.which("docker") is not None and subprocess.run(["docker", "compose", "version"]).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="docker compose is not installed")
@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")], ids=["cpu", "gpu"])
def test_docker_compose_parses_the_files_as_intended(files: tuple[str, ...]) -> None:
    """This needs no Docker engine."""
    chosen = [word for file in files for word in ("--file", file)]
    command = ["docker", "compose", *chosen, "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    server = json.loads(done.stdout)["services"]["server"]
    reserved = server["deploy"]["resources"].get("reservations", {}).get("devices", [])
    assert bool(reserved) == ("compose.gpu.yaml" in files)
    assert server["deploy"]["resources"]["limits"]["pids"] > 0
