"""The processors and the GPU of each worker, and what the supervisor has in memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.workers.fleet import gpu_for, gpus
from bf16kit.service.workers.worker import threads_of


@pytest.mark.parametrize(
    ("asked", "workers", "threads"), [(None, 2, 4), (None, 3, 2), (None, 9, 1), (5, 2, 5), (None, 1, 8)]
)
def test_processors_are_divided_equally_unless_the_operator_sets_the_number(
    asked: int | None, workers: int, threads: int
) -> None:
    assert threads_of(asked, workers, cpus=8) == threads


@pytest.mark.parametrize(
    ("device", "available", "first", "last"),
    [
        ("auto", ["0", "1", "2"], "0", "1"),
        ("cuda", ["0", "1"], "0", "0"),
        ("cuda:1", ["0", "1"], None, None),
        ("cpu", ["0", "1"], None, None),
        ("auto", ["0"], None, None),
        ("auto", [], None, None),
    ],
)
def test_gpus_are_assigned_to_workers_in_turn_if_there_is_something_to_divide(
    device: str, available: list[str], first: str | None, last: str | None
) -> None:
    assert (gpu_for(0, device, available), gpu_for(4, device, available)) == (first, last)


def test_gpus_are_those_of_the_environment_or_of_the_container(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus({}, tmp_path) == ["0", "1"]
    for told, found in (("2, GPU-8a5c", ["2", "GPU-8a5c"]), ("-1", []), ("", [])):
        assert gpus({"CUDA_VISIBLE_DEVICES": told}, tmp_path) == found


def test_the_supervisor_has_neither_grpc_nor_a_runtime_in_memory() -> None:
    program = (
        "import sys, bf16kit.service.cli, bf16kit.service.workers.supervisor as s\n"
        "print([name for name in ('grpc', 'onnxruntime', 'onnx', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_worker_gets_the_supervisors_configuration(tmp_path: Path) -> None:
    config = ServerConfig(repository=tmp_path, workers=3, max_in_flight=9, drain_seconds=3)
    assert ServerConfig(**config.model_dump(mode="json")) == config
