"""The servers are built with the values of the configuration."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from serverprocess import ServerProcess

from service.config.serverconfig import ServerConfig
from service.grpc.server import TransportOptions
from service.http.connection import Limits
from service.leader import http_limits
from service.server import transport_options

RENAMED = {"port": "grpc_port", "unix_socket": "grpc_socket", "overload": "overload_status"}
NOT_CONFIGURED = {"stream_window", "share_port"}
WORDS = {"host": "127.0.0.2", "unix_socket": "/socket", "overload": "UNAVAILABLE"}


def other_than(default: Any, name: str) -> Any:
    if isinstance(default, bool):
        return not default
    return WORDS[name] if isinstance(default, str) else default + 1


def test_every_option_of_the_transport_has_the_value_of_its_key(tmp_path: Path) -> None:
    defaults = {name: value for name, value in asdict(TransportOptions()).items() if name not in NOT_CONFIGURED}
    others = {name: other_than(value, name) for name, value in defaults.items()}
    config = ServerConfig(repository=tmp_path, **{RENAMED.get(name, name): value for name, value in others.items()})
    assert transport_options(config) == TransportOptions(**others)


def test_the_keys_have_the_defaults_of_the_options_they_set(tmp_path: Path) -> None:
    config = ServerConfig(repository=tmp_path)
    assert transport_options(config) == TransportOptions()
    assert http_limits(config) == Limits()


def test_every_limit_of_the_http_port_has_the_value_of_its_key(tmp_path: Path) -> None:
    config = ServerConfig(
        repository=tmp_path,
        http_max_connections=9,
        http_request_seconds=8,
        http_idle_seconds=7,
        http_max_header_bytes=2048,
    )
    assert http_limits(config) == Limits(
        connections=9, request_seconds=8, idle_seconds=7, response_seconds=7, header_bytes=2048
    )


def test_only_the_services_in_token_free_need_no_token(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("application-0123456 infer\n")
    (tmp_path / "tokens").chmod(0o600)
    (tmp_path / "server.yaml").write_text(f"token_free: [reflection]\ntoken_file: {tmp_path / 'tokens'}\n")
    (tmp_path / "models").mkdir()
    flags = ("--grpc-port", "0", "--http-port", "0", "--config", str(tmp_path / "server.yaml"))
    with (
        contextlib.closing(ServerProcess("--repository", str(tmp_path / "models"), *flags)) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        assert next(reflection.ServerReflectionInfo(iter([question]), timeout=20)).list_services_response.service
        health: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            health.Check(health_pb2.HealthCheckRequest(), timeout=20)
