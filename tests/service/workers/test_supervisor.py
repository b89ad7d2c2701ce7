"""The supervisor's modules and configuration, and what it does if it cannot keep a worker running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bf16kit.messages.errors import ConfigError
from service.config.serverconfig import ServerConfig, load_config


def test_the_supervisor_has_neither_grpc_nor_a_runtime_in_memory() -> None:
    program = (
        "import sys, service.cli, service.workers.supervisor as s\n"
        "print([name for name in ('grpc', 'onnxruntime', 'onnx', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("workers", [0, -1, 65])
def test_an_invalid_number_of_workers_is_rejected(tmp_path: Path, workers: int) -> None:
    with pytest.raises(ConfigError, match="workers"):
        load_config({"repository": tmp_path, "workers": workers})


def test_a_worker_gets_the_supervisors_configuration(tmp_path: Path) -> None:
    config = ServerConfig(repository=tmp_path, workers=3, max_in_flight=9, drain_seconds=3)
    assert ServerConfig(**config.model_dump(mode="json")) == config
