"""Tracing as configured: off, on, or an error that says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from loopback import LoopbackModel, LoopbackRegistry

from bf16kit.messages.errors import ConfigError
from service.config.serverconfig import ServerConfig
from service.server import open_tracing

REGISTRY = LoopbackRegistry([LoopbackModel()])


def configured(directory: Path, rate: int) -> ServerConfig:
    return ServerConfig(repository=directory, trace_rate=rate)


def count(outcome: str, traces: int) -> None: ...


def test_by_default_there_is_no_tracer_and_opentelemetry_is_not_imported(tmp_path: Path) -> None:
    settings, tracer = open_tracing(configured(tmp_path, 0), REGISTRY, count)
    assert (settings.on, tracer) == (False, None)
    program = "import sys, service.server; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "service.telemetry.tracing", raising=False)
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install 'bf16kit\[otel\]'"):
        open_tracing(configured(tmp_path, 1000), REGISTRY, count)


def test_opentelemetrys_own_switch_turns_tracing_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    settings, tracer = open_tracing(configured(tmp_path, 1000), REGISTRY, count)
    assert (settings.on, tracer) == (False, None)
