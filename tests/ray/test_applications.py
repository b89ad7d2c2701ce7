"""What Ray is told of the applications, and that it takes it; no cluster is needed for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from artifacts import write_mlp

from service.models.directory import Directory
from service.process.config import ServerConfig

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # what Ray and its libraries warn of is theirs


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

    config = applications.described(ServerConfig(repository=repository), 1.0)
    placed = place(Directory(repository).wish("a"))
    return placed, applications.deployment(placed, Scaling(**scaling), config)._deployment_config, config


def test_replicas_are_as_many_as_requests_in_flight_ask_for(repository: Path) -> None:
    _, told, _ = _deployment(repository, min_replicas=1, max_replicas=5, target=8)
    assert told.autoscaling_config.max_replicas == 5
    assert told.autoscaling_config.target_ongoing_requests == 8
    assert told.max_ongoing_requests == 32
    assert told.max_surge_percent == 25


def test_with_as_many_at_most_as_at_least_their_number_is_fixed(repository: Path) -> None:
    _, told, _ = _deployment(repository, min_replicas=3, max_replicas=3)
    assert (told.num_replicas, told.autoscaling_config) == (3, None)


def test_one_per_node_leaves_no_room_for_one_more(repository: Path) -> None:
    _, told, _ = _deployment(repository, per_node=1)
    assert told.max_surge_percent == 0


def test_a_replica_has_a_thread_for_each_of_its_processors(repository: Path) -> None:
    from deploy.ray import applications

    assert applications.described(ServerConfig(repository=repository), 4.0)["threads"] == 4
    assert applications.described(ServerConfig(repository=repository, threads=2), 4.0)["threads"] == 2


def test_rays_own_configuration_of_it_is_one_that_ray_takes(repository: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    command = [sys.executable, "-m", "deploy.ray", "--repository", str(repository), "--max-replicas", "3"]
    done = subprocess.run([*command, "--print-config"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = yaml.safe_load(done.stdout)
    assert ServeDeploySchema(**told)
    assert [each["name"] for each in told["applications"]] == ["bf16kit", "bf16kit.a", "bf16kit.b"]
    for each in told["applications"]:
        module, _, function = each["import_path"].partition(":")
        assert getattr(__import__(module, fromlist=[function]), function)(each["args"])
