"""The applications that Ray gets for a repository, and that Ray accepts them; this needs no cluster."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_mlp

from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.models.plan import Directory

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # warnings of Ray and its libraries


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name in ("a", "b"):
        write_mlp(root / name / "1")
    return root


def _deployment(repository: Path, **scaling: Any) -> Any:
    from bf16kit.deploy.ray import cluster
    from bf16kit.deploy.ray.settings import Scaling

    config = ServerConfig(repository=repository, drain_seconds=7)
    target = cluster.model_target(Directory(repository).desired_model("a"), config, Scaling(**scaling))
    return target.target._bound_deployment  # noqa: SLF001 -- Ray shows an application in no other way


def test_replicas_are_scaled_and_bounded_as_asked_with_the_memory_and_threads_of_their_place(repository: Path) -> None:
    from bf16kit.deploy.ray.settings import place

    scaled = _deployment(repository, min_replicas=1, max_replicas=5, target=8, cpus=4)
    told = scaled._deployment_config  # noqa: SLF001 -- as above
    assert (told.autoscaling_config.max_replicas, told.autoscaling_config.target_ongoing_requests) == (5, 8)
    assert (told.max_ongoing_requests, told.graceful_shutdown_timeout_s) == (32, 7)
    desired = Directory(repository).desired_model("a")
    placed = place(desired, ServerConfig(repository=repository))
    config, served, _, request_bytes = scaled.init_args
    assert scaled.ray_actor_options["memory"] == placed.memory
    assert (served, request_bytes) == (desired, placed.request_bytes)
    assert (config.max_message_bytes, config.threads) == (placed.config.max_message_bytes, 4)
    one_per_node = _deployment(repository, min_replicas=3, per_node=1)._deployment_config  # noqa: SLF001 -- as above
    assert (one_per_node.num_replicas, one_per_node.autoscaling_config, one_per_node.max_surge_percent) == (3, None, 0)


def _repository_deployment(repository: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[list[str]]]:
    """Return a deployment, and the applications that it tells Ray to run, of each time. Ray fails the second time."""
    from bf16kit.deploy.ray import cluster
    from bf16kit.deploy.ray.settings import Scaling

    told: list[list[str]] = []

    def run_many(targets: list[Any], **more: bool) -> None:
        told.append([target.name for target in targets])
        if len(told) == 2:
            raise RuntimeError("the controller does not answer")

    monkeypatch.setattr("ray.serve.run_many", run_many)
    return cluster.RepositoryDeployment(ServerConfig(repository=repository), Scaling()), told


def test_a_deployment_that_failed_is_sent_again_at_the_next_scan(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed, told = _repository_deployment(repository, monkeypatch)
    with pytest.raises(RuntimeError):
        deployed.deploy_changes()
    for _ in range(2):
        deployed.deploy_changes()
    assert told == 2 * [["bf16kit"], ["bf16kit.a", "bf16kit.b"]]


@pytest.mark.parametrize("removed", [False, True])
def test_a_model_that_failed_and_has_changed_is_tried_again_as_early_as_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    from bf16kit.deploy.ray.models import State

    (deployed, told), now = _repository_deployment(tmp_path, monkeypatch), 0.0
    monkeypatch.setattr("ray.serve.delete", lambda name: None)
    monkeypatch.setattr("time.monotonic", lambda: now)

    def is_retried(seconds: float) -> bool:
        nonlocal now
        now, before = now + seconds, len(told)
        deployed.retry({"bf16kit.m": State("DEPLOY_FAILED", "")})
        return len(told) > before

    deployed.deploy_changes()
    artifact = write_mlp(tmp_path / "m" / "1")
    with pytest.raises(RuntimeError):  # of Ray, as at each second time
        deployed.deploy_changes()
    deployed.deploy_changes()
    assert [is_retried(seconds) for seconds in (0, 29, 1, 59, 1)] == [False, False, True, False, True]
    if removed:
        shutil.move(artifact.path.parent, tmp_path.parent / "aside")
        deployed.deploy_changes()
        shutil.move(tmp_path.parent / "aside", tmp_path / "m")
    else:
        (tmp_path / "m" / "serving.yaml").write_text("max_queue_size: 2")
    deployed.deploy_changes()
    assert [is_retried(seconds) for seconds in (0, 29, 1)] == [False, False, True]


def test_an_empty_repository_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deployed, told = _repository_deployment(tmp_path, monkeypatch)
    for _ in range(2):
        deployed.deploy_changes()
    assert caplog.messages == [
        f"repository {tmp_path} is empty: serving, but not ready; put artifacts under <model>/<version>/ and restart"
    ]
    assert told == [["bf16kit"]]
