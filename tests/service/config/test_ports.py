"""A port that only the processes of one server share."""

import socket

import pytest

from bf16kit.messages.errors import ConfigError
from bf16kit.service.config.ports import reserve


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
    with reserve("127.0.0.1", 0) as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        for options in ((), (socket.SO_REUSEADDR,)):
            with pytest.raises(OSError, match="in use"):
                listen(port, *options)
        with pytest.raises(ConfigError, match="in use"), reserve("127.0.0.1", port):  # a second server
            pass
        with listen(port, socket.SO_REUSEPORT), listen(port, socket.SO_REUSEPORT):
            pass


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_a_port_in_use_is_rejected_whether_shared_or_not(options: tuple[int, ...]) -> None:
    with listen(0, *options) as held:
        port = held.getsockname()[1]
        in_use = pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--grpc-port")
        with in_use, reserve("127.0.0.1", port):
            pass


def test_a_released_port_is_free_again_despite_recently_closed_connections() -> None:
    with reserve("127.0.0.1", 0) as port, listen(port, socket.SO_REUSEPORT, socket.SO_REUSEADDR) as listener:
        client = socket.create_connection(("127.0.0.1", port))
        listener.accept()[0].close()  # closed from this side first: the connection lingers
        client.close()
    with reserve("127.0.0.1", port) as again:
        assert again == port


def test_an_address_of_another_machine_is_rejected_with_the_reason() -> None:
    elsewhere = pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0.*--host")
    with elsewhere, reserve("192.0.2.1", 0):
        pass
