"""The servers are built with the values of the configuration."""

from __future__ import annotations

from pathlib import Path

from service.config.serverconfig import ServerConfig
from service.grpc.transport import TransportOptions
from service.server import transport_options


def test_the_options_of_the_transport_have_the_values_of_their_keys(tmp_path: Path) -> None:
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


def test_the_keys_have_the_defaults_of_the_options_they_set(tmp_path: Path) -> None:
    config = ServerConfig(repository=tmp_path)
    assert transport_options(config) == TransportOptions()
