"""A replica takes no more memory than Ray reserves for it: otherwise Ray places more replicas on a node than fit."""

from pathlib import Path

import pytest
from childprocesses import children_of
from raycluster import PATIENCE, Served, replicas
from waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # warnings of Ray and its libraries


def _held(pid: int) -> int:
    """Return the bytes that a process and its children hold; shared memory is counted in part (PSS)."""
    own = next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return (int(own.split()[1]) << 10) + sum(map(_held, children_of(pid)))


def _measured(served: Served) -> float:
    return served.metric("bf16kit_drift_samples_total", model="mlp", outcome="measured")


def test_a_replica_takes_no_more_memory_than_ray_reserves(served: Served, repository: Path) -> None:
    """The replica's reference is running meanwhile, in a separate process."""
    from bf16kit.deploy.ray.settings import place
    from bf16kit.service.config.serverconfig import ServerConfig
    from bf16kit.service.models.plan import Directory

    def sampled() -> bool:
        for _ in range(50):
            served.infer()
        return _measured(served) > 0

    until(sampled, PATIENCE, "a sample that is measured")
    placed = place(Directory(repository).desired_model("mlp"), ServerConfig(repository=repository))
    held = [_held(pid) for pid in replicas("mlp")]
    assert held
    assert max(held) < placed.memory, f"{max(held) >> 20} MiB are held, {placed.memory >> 20} MiB are reserved"
