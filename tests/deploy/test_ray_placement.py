"""What Ray reserves for a replica on its node, and the memory limits that follow from that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_mlp

from deploy.ray import placement
from deploy.ray.placement import REFERENCE_PROCESS_BYTES, Placement, place
from service.config.memory import request_bytes
from service.config.serverconfig import ServerConfig
from service.models.directory import Directory
from service.shadow.referencememory import fp32_bytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BF16KIT_MAX"):
            monkeypatch.delenv(name)


def placed(root: Path, serving: str = "", **given: Any) -> Placement:
    if not (root / "m").exists():
        write_mlp(root / "m" / "1")
    (root / "m" / "serving.yaml").write_text(serving)
    return place(Directory(root).desired_model("m"), ServerConfig(repository=root, **given))


def test_requests_get_a_quarter_of_the_reserved_memory(tmp_path: Path) -> None:
    """The limit is computed as for a container, because several replicas may share one."""
    from bf16kit.system.controlgroup import Memory

    found = placed(tmp_path)
    assert found.config.max_request_bytes == request_bytes(Memory(found.memory, 0)) < 512 * MIB
    assert found.config.max_message_bytes == 64 * MIB


def test_requests_of_a_large_replica_get_the_usual_maximum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PROCESS_BYTES", 8 << 30)
    found = placed(tmp_path)
    assert found.memory > 8 << 30
    assert found.config.max_request_bytes == 512 * MIB


def test_configured_request_limits_are_kept_and_reserved(tmp_path: Path) -> None:
    default = placed(tmp_path)
    base = default.memory - default.config.max_request_bytes
    more = placed(tmp_path, max_request_bytes=2 << 30)
    assert more.config.max_request_bytes == 2 << 30
    assert more.memory == base + (2 << 30)
    alone = placed(tmp_path, max_request_bytes=8 * MIB, max_message_bytes=256 * MIB)
    assert alone.memory == base + 256 * MIB, "one request is let in however large it is"


def test_memory_is_reserved_for_the_reference_that_measures_drift(tmp_path: Path) -> None:
    measured, unmeasured = placed(tmp_path), placed(tmp_path, "shadow: {rate: 0}")
    manifest_bytes = fp32_bytes(write_mlp(tmp_path / "same" / "1").manifest)
    freed = measured.memory - measured.config.max_request_bytes
    freed -= unmeasured.memory - unmeasured.config.max_request_bytes
    assert freed > 1.33 * manifest_bytes + REFERENCE_PROCESS_BYTES


def test_a_model_with_fp32_fallback_reserves_memory_for_it(tmp_path: Path) -> None:
    write_mlp(tmp_path / "m" / "1", width=512)
    alerts, falls = placed(tmp_path), placed(tmp_path, "fallback: fp32")
    assert falls.memory - alerts.memory >= 1.33 * 2 * 512 * 512 * 4


def test_placing_a_placed_model_again_gives_the_same_memory(tmp_path: Path) -> None:
    """Ray's configuration file contains the computed values, and is read again where the application is built."""
    first = placed(tmp_path)
    config = ServerConfig(**first.config.model_dump(mode="json"))
    assert place(first.desired, config).memory == first.memory


def test_an_artifact_that_cannot_be_opened_is_still_placed(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    found = placed(tmp_path)
    assert found.refused
    assert found.memory > 0
    assert found.desired.plans
