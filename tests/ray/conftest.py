"""A real Ray cluster of two nodes on this machine that serves a repository. run.sh determines where it listens."""

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from artifacts import write_mlp
from raycluster import NODE, PATIENCE, Served, free_ports
from waiting import until


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a cluster of a head and another node. Each has room for three replicas, so not for all four of `served`."""
    ray = pytest.importorskip("ray", reason="Ray is not installed here: make test-ray does it")
    from ray.cluster_utils import Cluster

    root, tests = Path(__file__).parents[2], Path(__file__).parents[1]
    path = (str(root), str(tests / "support"), os.environ.get("PYTHONPATH", ""))
    os.environ.update(PYTHONPATH=os.pathsep.join(path), RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    os.environ.update(RAY_enable_metrics_collection="0", RAY_AUTH_MODE="disabled")
    os.environ.update(RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=str(8 << 20))
    os.environ.update(RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="60")  # 5 s are too few on a busy machine
    # The front would send requests only to the replicas of its node: those that the tests kill must get requests too.
    os.environ.update(RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING="0")
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _filled(tmp_path_factory.mktemp("repository"))


def _filled(root: Path) -> Path:
    """Write ``mlp``, and ``slow``: of its requests at most two may wait, each for three seconds for a fuller batch."""
    write_mlp(root / "mlp" / "1")
    write_mlp(root / "slow" / "1")
    (root / "slow" / "serving.yaml").write_text("max_queue_delay_ms: 3000\nmax_queue_size: 2\n")
    return root


@pytest.fixture(scope="session")
def served(cluster: Any, repository: Path) -> Iterator[Served]:
    """Yield both models, served by two replicas each."""
    from bf16kit.deploy.ray import cluster as program
    from bf16kit.deploy.ray.settings import Scaling
    from bf16kit.service.config.serverconfig import ServerConfig

    ports = free_ports()
    config = ServerConfig(
        repository=repository,
        grpc_port=ports[0],
        http_port=ports[1],
        device="cpu",
        model_control="poll",
        max_message_bytes=1 << 20,
        drain_seconds=10,
    )
    program.join(cluster.address, config, "HeadOnly")
    deployed = program.RepositoryDeployment(config, Scaling(min_replicas=2, max_replicas=2, cpus=0.6))
    deployed.deploy_changes()
    with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
        found = Served(channel, f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", deployed, cluster)
        until(found.all_running, PATIENCE, "all applications running")
        until(lambda: len(found.targets()) == 4, PATIENCE, "every replica known to the front")
        yield found
        deployed.remove()


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a channel to a server of one process that serves the same models."""
    from inprocess import running

    same = _filled(tmp_path_factory.mktemp("plain"))
    with running(same, "mlp", "slow", max_message_bytes=1 << 20) as address, grpc.insecure_channel(address) as channel:
        yield channel


@pytest.fixture(autouse=True, scope="session")
def _no_proxy() -> None:
    """Bypass any HTTP proxy: the tests open URLs on this machine only."""
    urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))
