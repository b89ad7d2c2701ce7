"""The configuration of the applications that Ray gets, and that Ray accepts it; this needs no cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from artifacts import write_mlp
from raycluster import PATIENCE

from bf16kit.messages.errors import ConfigError
from service.config.serverconfig import ServerConfig
from service.models.directory import Directory

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # warnings of Ray and its libraries


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name in ("a", "b"):
        write_mlp(root / name / "1")
    return root


def _deployment(repository: Path, **scaling: Any) -> Any:
    from deploy.ray import applications
    from deploy.ray.placement import place
    from deploy.ray.settings import Scaling

    placed = place(Directory(repository).desired_model("a"), ServerConfig(repository=repository, drain_seconds=7))
    return applications.deployment(placed, Scaling(**scaling))._deployment_config


def test_autoscaling_follows_the_requests_in_flight(repository: Path) -> None:
    told = _deployment(repository, min_replicas=1, max_replicas=5, target=8)
    assert told.autoscaling_config.max_replicas == 5
    assert told.autoscaling_config.target_ongoing_requests == 8
    assert told.max_ongoing_requests == 32
    assert told.max_surge_percent == 25
    assert told.graceful_shutdown_timeout_s == 7


def test_equal_bounds_fix_the_number_of_replicas(repository: Path) -> None:
    told = _deployment(repository, min_replicas=3, max_replicas=3)
    assert (told.num_replicas, told.autoscaling_config) == (3, None)


def test_one_replica_per_node_allows_no_surge_during_updates(repository: Path) -> None:
    told = _deployment(repository, per_node=1)
    assert told.max_surge_percent == 0


def test_a_replica_has_a_thread_for_each_of_its_processors(repository: Path) -> None:
    from deploy.ray import applications

    assert applications.config_as_json(ServerConfig(repository=repository), 4.0)["threads"] == 4
    assert applications.config_as_json(ServerConfig(repository=repository, threads=2), 4.0)["threads"] == 2


def test_the_reserved_memory_limits_the_replica(repository: Path) -> None:
    """Ray's configuration contains the limits too, so that they need not be computed again."""
    from deploy.ray import applications
    from deploy.ray.placement import place
    from deploy.ray.settings import Scaling

    config, desired = ServerConfig(repository=repository), Directory(repository).desired_model("a")
    told = applications.all_arguments(config, Scaling(), {"a": desired})["bf16kit.a"]
    for arguments in (told, {"config": {"repository": str(repository)}, "model": "a"}):
        deployed = applications.model(arguments)._bound_deployment
        reserved = deployed._replica_config.ray_actor_options["memory"]
        given, _ = deployed._replica_config.init_args
        assert reserved == place(desired, config).memory
        assert given["max_request_bytes"] == reserved // 4 == told["config"]["max_request_bytes"]


def test_the_fronts_request_limit_fits_its_reserved_memory(repository: Path) -> None:
    from deploy.ray import applications

    deployed = applications.front({"config": {"repository": str(repository)}})._bound_deployment
    reserved = deployed._replica_config.ray_actor_options["memory"]
    assert deployed._replica_config.init_args[0]["max_request_bytes"] <= reserved // 4


def test_a_deployment_that_failed_is_sent_again_at_the_next_scan(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.ray import cluster
    from deploy.ray.settings import Scaling

    told: list[list[str]] = []

    def run_many(targets: list[Any], **more: bool) -> None:
        told.append([target.name for target in targets])
        if len(told) == 2:
            raise RuntimeError("the controller does not answer")

    monkeypatch.setattr("ray.serve.run_many", run_many)
    monkeypatch.setattr("ray.nodes", list)
    deployed = cluster.RepositoryDeployment(ServerConfig(repository=repository), Scaling())
    with pytest.raises(RuntimeError):
        deployed.deploy_changes()
    for _ in range(2):
        deployed.deploy_changes()
    assert told == 2 * [["bf16kit"], ["bf16kit.a", "bf16kit.b"]]


def test_an_empty_repository_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deploy.ray import cluster
    from deploy.ray.settings import Scaling

    told: list[str] = []
    monkeypatch.setattr("ray.serve.run_many", lambda targets, **more: told.extend(each.name for each in targets))
    deployed = cluster.RepositoryDeployment(ServerConfig(repository=tmp_path), Scaling())
    for _ in range(2):
        deployed.deploy_changes()
    assert caplog.messages == [
        f"repository {tmp_path} is empty: serving, but not ready; put artifacts under <model>/<version>/ and restart"
    ]
    assert told == ["bf16kit"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "config: 'repository' is missing"),
        ({"repository": ".", "grpc_prot": 1}, "unknown key 'grpc_prot'"),
        ({"repository": ".", "workers": 2}, "workers is 2, which is not supported with Ray"),
    ],
)
def test_a_manually_edited_configuration_file_is_validated(config: dict[str, Any], said: str) -> None:
    from deploy.ray import applications

    with pytest.raises(ConfigError, match=said):
        applications.model({"config": config, "model": "a"})


def test_the_printed_configuration_is_valid_for_ray(repository: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    command = [sys.executable, "-m", "deploy.ray", "--repository", str(repository), "--max-replicas", "3"]
    done = subprocess.run([*command, "--print-config"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    told = yaml.safe_load(done.stdout)
    assert ServeDeploySchema(**told)
    assert [each["name"] for each in told["applications"]] == ["bf16kit", "bf16kit.a", "bf16kit.b"]
    for each in told["applications"]:
        module, _, function = each["import_path"].partition(":")
        assert getattr(__import__(module, fromlist=[function]), function)(each["args"])
