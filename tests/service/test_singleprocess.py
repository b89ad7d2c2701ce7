"""The server as one process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from service.drift.owner import FallbackOwner
from service.process.config import ServerConfig
from service.process.stop import Stop
from service.singleprocess import serve_single_process


def test_the_owner_of_the_fallback_is_called_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a version that replaces one served in fp32 would not return to bf16 until it is sampled."""
    tended = threading.Event()
    monkeypatch.setattr(FallbackOwner, "maintain", lambda self: tended.set())
    stop, config = Stop(), ServerConfig(repository=tmp_path, grpc_port=0, http_port=0, drain_seconds=1)
    thread = threading.Thread(target=serve_single_process, args=(config, stop, lambda *ports: None))
    thread.start()
    try:
        assert tended.wait(60)
    finally:
        stop.set()
        thread.join()
        stop.close()
