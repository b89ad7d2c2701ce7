"""A server as configured: its transport, its traces and its shared memory."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import LoopbackModel, LoopbackRegistry

from bf16kit.messages.errors import ConfigError, InvalidRequest
from bf16kit.service.config.serverconfig import ServerConfig, load_config
from bf16kit.service.grpc.transport import TransportOptions
from bf16kit.service.leader import open_regions
from bf16kit.service.operations import Region
from bf16kit.service.server import open_tracing, transport_options

REGISTRY = LoopbackRegistry([LoopbackModel()])


def test_the_options_of_the_transport_have_the_values_of_their_keys_and_their_defaults(tmp_path: Path) -> None:
    config = ServerConfig(
        repository=tmp_path,
        host="127.0.0.2",
        grpc_port=9,
        max_in_flight=8,
        max_message_bytes=7 << 10,
        max_connection_age_seconds=6,
        workers=2,
    )
    assert transport_options(config) == TransportOptions(
        host="127.0.0.2",
        port=9,
        max_in_flight=8,
        max_message_bytes=7 << 10,
        max_request_bytes=56 << 10,
        max_connection_age_seconds=6,
        share_port=True,
    )
    assert transport_options(ServerConfig(repository=tmp_path)) == TransportOptions()


def test_by_default_there_is_no_tracer_and_opentelemetry_is_not_imported(tmp_path: Path) -> None:
    settings, tracer = open_tracing(ServerConfig(repository=tmp_path), REGISTRY, lambda *count: None)
    assert (settings.on, tracer) == (False, None)
    program = (
        "import sys, bf16kit.service.server; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_tracing_without_the_extra_is_an_error_that_names_it_unless_opentelemetrys_own_switch_turns_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(repository=tmp_path, trace_rate=1000)
    monkeypatch.delitem(sys.modules, "bf16kit.service.telemetry.tracing", raising=False)
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"needs OpenTelemetry: pip install 'bf16kit\[otel\]'"):
        open_tracing(config, REGISTRY, lambda *count: None)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    settings, tracer = open_tracing(config, REGISTRY, lambda *count: None)
    assert (settings.on, tracer) == (False, None)


@pytest.mark.parametrize(
    ("text", "prefix"),
    [("true", "bf16kit"), ("1", "bf16kit"), ("ours", "ours"), ("*", ""), ("false", None), ("", None)],
)
def test_a_variable_turns_shared_memory_on_for_names_with_a_prefix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, text: str, prefix: str | None
) -> None:
    monkeypatch.setenv("BF16KIT_SHARED_MEMORY", text)
    caplog.set_level(logging.INFO)
    table = open_regions(load_config({"repository": tmp_path}))
    assert (table is None) is (prefix is None)
    assert ("shared_memory is *: clients may register every file" in caplog.text) is (prefix == "")
    if table is not None:
        assert (f"whose names begin with {prefix!r}" in caplog.text) is (prefix != "")
        with pytest.raises(InvalidRequest, match=f"its name beginning with '{prefix}'"):
            table.register(Region("r", "/other-file-that-is-not-there", 0, 1))


@pytest.mark.parametrize("prefix", ["/bf16kit", "a/b", "*foo", "none", "..\0/", "", 7, []])
def test_a_prefix_that_no_plain_file_name_can_begin_with_is_rejected(tmp_path: Path, prefix: object) -> None:
    with pytest.raises(ConfigError, match=r"'shared_memory' is .*give true, false, the start of a file's name"):
        load_config({"repository": tmp_path, "shared_memory": prefix or [prefix]})
