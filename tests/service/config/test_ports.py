"""A port that only the processes of one server share, and the path of a Unix socket of one server."""

from __future__ import annotations

import socket

import pytest

from bf16kit.messages.errors import ConfigError
from service.config.ports import ReservedPort


def listen(port: int, *options: int) -> socket.socket:
    held = socket.socket()
    for option in options:
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        held.bind(("127.0.0.1", port))
        held.listen()
    except OSError:
        held.close()
        raise
    return held


def test_only_processes_that_share_the_port_may_listen_on_it() -> None:
    with ReservedPort("127.0.0.1", 0) as port:
        assert port.port > 0
        for options in ((), (socket.SO_REUSEADDR,)):
            with pytest.raises(OSError, match="in use"):
                listen(port.port, *options)
        with listen(port.port, socket.SO_REUSEPORT), listen(port.port, socket.SO_REUSEPORT):
            pass


def test_a_reserved_port_accepts_no_connection() -> None:
    with ReservedPort("127.0.0.1", 0) as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.port))


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_a_port_in_use_is_rejected_whether_shared_or_not(options: tuple[int, ...]) -> None:
    with listen(0, *options) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--grpc-port"):
            ReservedPort("127.0.0.1", port)


def test_a_reserved_port_is_rejected_for_a_second_server_even_before_any_listens() -> None:
    with ReservedPort("127.0.0.1", 0) as port, pytest.raises(ConfigError, match="in use"):
        ReservedPort("127.0.0.1", port.port)


def test_a_released_port_is_free_again_despite_recently_closed_connections() -> None:
    with ReservedPort("127.0.0.1", 0) as port:
        number = port.port
        with listen(number, socket.SO_REUSEPORT, socket.SO_REUSEADDR) as listener:
            client = socket.create_connection(("127.0.0.1", number))
            listener.accept()[0].close()  # closed from this side first: the connection lingers
            client.close()
    with ReservedPort("127.0.0.1", number) as again:
        assert again.port == number


def test_an_address_of_another_machine_is_rejected_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0.*--host"):
        ReservedPort("192.0.2.1", 0)
