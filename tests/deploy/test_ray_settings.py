"""What replicas behind Ray are given, which needs no Ray: settings that are rejected, and memory that is reserved."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_mlp

from bf16kit.deploy.ray.settings import REFERENCE_PROCESS_BYTES, Placement, Scaling, check, place
from bf16kit.messages.errors import ConfigError
from bf16kit.service.config.resources import request_bytes
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.service.models.plan import Directory
from bf16kit.service.shadow.referencememory import fp32_bytes
from bf16kit.system.controlgroup import Memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BF16KIT_MAX"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers": 2}, "workers is 2, which is not supported with Ray: Ray scales by replicas"),
        ({"shared_memory": True}, "another machine"),
        ({"tls_certificate": "/c.pem", "tls_key": "/k.pem"}, "tls_certificate is /c.pem, which is not supported"),
        ({"max_in_flight": 4}, "max_in_flight is 4, .*: set --target"),
        ({"max_connection_age_seconds": 9}, "max_connection_age_seconds is 9.0, .*: leave it out"),
        ({"model_control": "explicit"}, "one replica of many"),
        ({"load_model": ("m",), "model_control": "explicit"}, "every model of the repository is served"),
        ({"grpc_port": 0}, "grpc_port is 0 and http_port 8002; give two that differ, and not 0"),
        ({"grpc_port": 8002}, "grpc_port is 8002 and http_port 8002"),
    ],
)
def test_server_settings_that_ray_does_not_support_are_rejected(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check(ServerConfig(repository=tmp_path, **settings))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_replicas": 0}, "'min_replicas' is 0: input should be greater than or equal to 1"),
        ({"min_replicas": 3, "max_replicas": 1}, "min_replicas is 3 and max_replicas 1"),
        ({"max_replicas": 0}, "'max_replicas' is 0"),
        ({"proxies": "Some"}, "'proxies' is 'Some'"),
        ({"cpus": 0}, "'cpus' is 0: input should be greater than 0"),
        ({"target": float("nan")}, "'target' is nan"),
        ({"gpus": float("inf")}, "'gpus' is inf"),
        ({"queued": 0}, "'queued' is 0"),
        ({"per_node": -1}, "'per_node' is -1"),
        ({"cpus": "two"}, "scaling: 'cpus' is 'two'"),
        ({"cpu": 2}, "unknown key 'cpu'"),
    ],
)
def test_invalid_scaling_values_are_rejected(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Scaling.of(wrong)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--min-replicas", "0"), "'min_replicas' is '0'"), (("--model-control", "explicit"), "one replica of many")],
)
def test_the_program_reports_wrong_arguments_without_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    command = [sys.executable, "-m", "bf16kit.deploy.ray", "--repository", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert said in done.stderr


def placed(root: Path, serving: str = "", **given: Any) -> Placement:
    if not (root / "m").exists():
        write_mlp(root / "m" / "1")
    (root / "m" / "serving.yaml").write_text(serving)
    return place(Directory(root).desired_model("m"), ServerConfig(repository=root, **given))


def without_requests(found: Placement) -> int:
    return found.memory - found.request_bytes


def test_requests_get_a_quarter_of_the_reserved_memory_or_room_for_one_of_the_configured_size(tmp_path: Path) -> None:
    """The limit is computed as for a container, because several replicas may share one."""
    found, more = placed(tmp_path), placed(tmp_path, max_message_bytes=2 << 30)
    assert found.request_bytes == request_bytes(Memory(found.memory, 0)) < 512 * MIB
    assert found.config.max_message_bytes == 64 * MIB
    assert more.config.max_message_bytes == 2 << 30
    assert more.memory == without_requests(found) + (2 << 30), "one request is let in however large it is"
    assert placed(tmp_path, max_message_bytes=8 * MIB).request_bytes == 64 * MIB


def test_the_reference_of_a_measured_model_and_an_fp32_fallback_are_reserved(tmp_path: Path) -> None:
    fp32 = fp32_bytes(write_mlp(tmp_path / "m" / "1", width=512).manifest)
    measured, unmeasured = placed(tmp_path), placed(tmp_path, "shadow: {rate: 0}")
    assert without_requests(measured) - without_requests(unmeasured) - REFERENCE_PROCESS_BYTES > 1.33 * fp32
    assert placed(tmp_path, "fallback: fp32").memory - measured.memory >= 1.33 * fp32


def test_a_larger_artifact_reserves_more_memory(tmp_path: Path) -> None:
    small = placed(tmp_path / "small").memory
    written = write_mlp(tmp_path / "large" / "m" / "1", width=1024)
    weights = sum(entry.bytes for name, entry in written.manifest.files.items() if name.startswith("weights."))
    assert placed(tmp_path / "large").memory - small >= 3 * weights  # the model, and its reference of twice the size


def test_an_artifact_that_cannot_be_opened_is_still_placed(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert placed(tmp_path).memory > 0
