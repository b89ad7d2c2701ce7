"""A server's memory limits in containers of several sizes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from bf16kit.system.controlgroup import Memory
from service.config.resources import announce, fit_to_memory
from service.config.serverconfig import ServerConfig, load_config

MIB = 1 << 20


def config(tmp_path: Path, **flags: object) -> ServerConfig:
    return load_config({"repository": str(tmp_path), **flags})


def test_requests_get_a_quarter_of_a_small_container(tmp_path: Path) -> None:
    found = fit_to_memory(config(tmp_path), Memory(limit=1024 * MIB, left=900 * MIB))
    assert (found.max_request_bytes, found.max_message_bytes) == (256 * MIB, 64 * MIB)
    found = fit_to_memory(config(tmp_path), Memory(limit=128 * MIB, left=100 * MIB))
    assert (found.max_request_bytes, found.max_message_bytes) == (32 * MIB, 32 * MIB)


def test_workers_share_the_memory_for_requests(tmp_path: Path) -> None:
    found = fit_to_memory(config(tmp_path, workers=4), Memory(limit=1024 * MIB, left=900 * MIB))
    assert found.max_request_bytes == 64 * MIB


def test_without_a_limit_and_in_a_large_container_the_defaults_apply(tmp_path: Path) -> None:
    asked = config(tmp_path)
    assert fit_to_memory(asked, None) == asked
    assert fit_to_memory(asked, Memory(limit=64 << 30, left=1 << 30)) == asked


def test_a_configured_limit_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BF16KIT_MAX_REQUEST_BYTES", str(300 * MIB))
    found = fit_to_memory(config(tmp_path), Memory(limit=128 * MIB, left=100 * MIB))
    assert (found.max_request_bytes, found.max_message_bytes) == (300 * MIB, 32 * MIB)


def test_a_message_may_have_1_mib_however_small_the_container(tmp_path: Path) -> None:
    found = fit_to_memory(config(tmp_path, workers=2), Memory(limit=MIB, left=0))
    assert found.max_message_bytes == MIB


def test_the_log_states_the_containers_limit_and_those_derived_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    small = Memory(limit=512 * MIB, left=500 * MIB)
    announce(fit_to_memory(config(tmp_path), small), small)
    assert caplog.messages == [
        "memory: 524 MB are left of the 537 MB that this container may take; requests may use 134217728 bytes of it,"
        " one message at most 67108864"
    ]
    announce(config(tmp_path), None)
    assert len(caplog.messages) == 1


def test_a_container_too_small_for_any_server_gets_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    announce(config(tmp_path), Memory(limit=96 * MIB, left=60 * MIB))
    assert caplog.messages == []
    announce(config(tmp_path), Memory(limit=64 * MIB, left=30 * MIB))
    assert caplog.messages == [
        "memory: 67 MB are too little for a server, even without a model: the system may kill it at any time; give the"
        " container 101 MB plus what its models take (docker run --memory, resources.limits.memory)"
    ]
