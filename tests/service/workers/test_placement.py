"""Which processors and which GPU each worker gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.workers.fleet import gpu_for, gpus, threads_of


@pytest.mark.parametrize(
    ("asked", "workers", "cpus", "threads"),
    [(None, 2, 8, 4), (None, 3, 8, 2), (None, 8, 2, 1), (5, 2, 8, 5), (None, 1, 8, 8)],
)
def test_processors_are_divided_equally_unless_the_operator_sets_the_number(
    asked: int | None, workers: int, cpus: int, threads: int
) -> None:
    assert threads_of(asked, workers, cpus) == threads


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_are_assigned_to_workers_in_turn(device: str) -> None:
    assert [gpu_for(worker, device, ["0", "1", "2"]) for worker in range(5)] == ["0", "1", "2", "0", "1"]


@pytest.mark.parametrize(
    ("device", "available"), [("cuda:1", ["0", "1"]), ("cpu", ["0", "1"]), ("auto", ["0"]), ("auto", [])]
)
def test_workers_see_all_gpus_of_the_server_if_there_is_nothing_to_divide(device: str, available: list[str]) -> None:
    assert gpu_for(1, device, available) is None


def test_gpus_are_those_of_the_environment_or_of_the_container(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus({}, tmp_path) == ["0", "1"]
    assert gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-8a5c"}, tmp_path) == ["2", "GPU-8a5c"]
    assert gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
