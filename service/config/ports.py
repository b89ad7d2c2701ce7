"""Listen on a port, or reserve one for several processes. Errors name the setting."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bf16kit.messages.errors import ConfigError


def listen(host: str, port: int, flag: str, backlog: int = 1) -> socket.socket:
    """Return a listening socket; ``port`` 0 takes any free one.

    Raises ConfigError naming ``flag``, e.g. --grpc-port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that cannot be a domain name
        raise ConfigError(_failure_message(host, port, flag, error)) from None


@contextmanager
def reserve(host: str, port: int) -> Iterator[int]:
    """Reserve a port for processes of this server, which share it (SO_REUSEPORT); yield its number.

    The sockets do not listen: the kernel gives connections to the processes that do. Another program cannot take the
    port unless it sets SO_REUSEPORT too. Raises ConfigError if another program has the port already.
    """
    with ExitStack() as held:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(_failure_message(host, port, "--grpc-port", error)) from None
        number, failed = 0, None
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            try:
                number = held.enter_context(_bound(family, (address[0], number or port, *address[2:]))).getsockname()[1]
            except OSError as error:  # as in gRPC, this machine may lack some addresses of a name
                failed = error
        if failed is not None and (failed.errno == errno.EADDRINUSE or not number):
            raise ConfigError(_failure_message(host, port, "--grpc-port", failed))
        yield number


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    # SO_REUSEADDR for the bind: recently closed connections do not block the port, a listening program does.
    # Afterwards only SO_REUSEPORT stays on, so that another program cannot bind with SO_REUSEADDR alone.
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # as gRPC does: [::] covers IPv4 as well
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        bound.close()
        raise
    return bound


def _failure_message(host: str, port: int, flag: str, error: OSError | UnicodeError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; stop it, or choose another {flag}"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"cannot listen on {host} port {port}: {reason}; check --host and {flag}"
