"""What Ray reserves for a replica on its node, and the memory limits that follow from that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_mlp

from deploy.ray.placement import REFERENCE_PROCESS_BYTES, Placement, place
from service.config.resources import request_bytes
from service.config.serverconfig import ServerConfig
from service.models.directory import Directory
from service.shadow.memory import fp32_bytes

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


def bound(found: Placement) -> int | None:
    return found.desired.plans[0].serving.shadow.reference_memory_bytes


def test_requests_get_a_quarter_of_the_reserved_memory(tmp_path: Path) -> None:
    """The limit is computed as for a container, because several replicas may share one."""
    from bf16kit.system.controlgroup import Memory

    found = placed(tmp_path)
    assert found.config.max_request_bytes == request_bytes(Memory(found.memory, 0)) < 512 * MIB
    assert found.config.max_message_bytes == 64 * MIB


def test_requests_of_a_large_replica_get_the_usual_maximum(tmp_path: Path) -> None:
    found = placed(tmp_path, f"shadow: {{reference_memory_bytes: {8 << 30}}}")
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


def test_the_references_limit_equals_its_reserved_memory(tmp_path: Path) -> None:
    measured, unmeasured = placed(tmp_path), placed(tmp_path, "shadow: {rate: 0}")
    own = bound(measured)
    assert own is not None
    manifest_bytes = fp32_bytes(write_mlp(tmp_path / "same" / "1").manifest)
    assert own > 1.33 * manifest_bytes
    freed = measured.memory - measured.config.max_request_bytes
    freed -= unmeasured.memory - unmeasured.config.max_request_bytes
    assert freed == own + REFERENCE_PROCESS_BYTES
    assert bound(unmeasured) is None


def test_a_configured_reference_limit_is_reserved(tmp_path: Path) -> None:
    default, given = placed(tmp_path), placed(tmp_path, f"shadow: {{reference_memory_bytes: {900 * MIB}}}")
    assert bound(given) == 900 * MIB
    more = given.memory - given.config.max_request_bytes - default.memory + default.config.max_request_bytes
    assert more == 900 * MIB - (bound(default) or 0)


def test_a_reference_on_another_server_reserves_no_memory_for_weights(tmp_path: Path) -> None:
    here, there = placed(tmp_path), placed(tmp_path, "shadow: {reference: 'grpc://other:8001/m'}")
    assert bound(there) is None
    saved = here.memory - here.config.max_request_bytes - there.memory + there.config.max_request_bytes
    assert saved == bound(here), "and who asks it is a process here"


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
