"""Listen on a port, reserve one for several processes, or claim the path of a Unix socket. Errors name the setting."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import os_error_text

_LONGEST_PATH = 107  # bytes of a Unix socket's path on Linux


def listen(host: str, port: int, flag: str, backlog: int = 1) -> socket.socket:
    """Return a listening socket; ``port`` 0 takes any free one.

    Raises ConfigError naming ``flag``, e.g. --grpc-port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that cannot be a domain name
        raise ConfigError(_failure_message(host, port, flag, error)) from None


class ReservedPort:
    """A context that reserves a port for processes of this server, which share it (SO_REUSEPORT).

    This socket does not listen: the kernel gives connections to the processes that do. Another program cannot take the
    port unless it sets SO_REUSEPORT too. Raises ConfigError if another program has the port already.
    """

    def __init__(self, host: str, port: int) -> None:
        self._sockets: list[socket.socket] = []
        self.port = port
        try:
            addresses = dict.fromkeys(
                (family, address)
                for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError) as error:
            raise ConfigError(_failure_message(host, port, "--grpc-port", error)) from None
        failed: OSError | None = None
        for family, address in addresses:
            try:
                self._bind(family, (address[0], self.port, *address[2:]))
            except OSError as error:  # as in gRPC, this machine may lack some addresses of a name
                failed = error
        if failed is not None and (failed.errno == errno.EADDRINUSE or not self._sockets):
            self.close()
            raise ConfigError(_failure_message(host, port, "--grpc-port", failed))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the port."""
        for each in self._sockets:
            each.close()

    def _bind(self, family: int, address: tuple[object, ...]) -> None:
        bound = socket.socket(family, socket.SOCK_STREAM)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # as gRPC does: [::] covers IPv4 as well
        # SO_REUSEADDR for the bind: recently closed connections do not block the port, a listening program does.
        # Afterwards only SO_REUSEPORT stays on, so that another program cannot bind with SO_REUSEADDR alone.
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            bound.close()
            raise
        self._sockets.append(bound)
        self.port = int(bound.getsockname()[1])


class ClaimedPath:
    """The path of a Unix socket that no other server may take as long as this object exists.

    It must outlive the gRPC server, which removes the socket some time after it was told to stop. The claim is a lock
    on the file PATH.lock, which stays: removing it would let two servers lock two files. Raises ConfigError if another
    program has the path, or something else than a socket is there. A socket that nobody listens on, left behind by a
    server that was killed, is no obstacle.
    """

    def __init__(self, path: str) -> None:
        if (length := len(os.fsencode(path))) > _LONGEST_PATH:
            raise ConfigError(f"grpc_socket {path} has {length} bytes; choose a path of at most {_LONGEST_PATH}")
        lock = f"{path}.lock"
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = f"cannot open {lock}: {os_error_text(error)}"
            remedy = (
                f"remove {lock}, which another user owns"
                if Path(lock).exists()
                else "choose a path in a writable directory"
            )
            raise ConfigError(f"grpc_socket {path}: {reason}; {remedy}") from None
        release = weakref.finalize(self, os.close, descriptor)
        try:
            _check_free(path, descriptor)
        except ConfigError:
            release()
            raise


def _check_free(path: str, lock: int) -> None:
    """Lock ``lock``. Raises ConfigError if it is locked, or ``path`` is neither free nor a socket without listener."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"grpc_socket {path} belongs to another server that runs; stop it, or choose another path"
        ) from None
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(Path(path).lstat().st_mode):
            raise ConfigError(f"grpc_socket {path} exists and is no socket; remove it, or choose another path")
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)  # a listener that accepts nothing is not waited for
            code = client.connect_ex(path)
        if code != errno.ECONNREFUSED:
            raise ConfigError(f"another program listens on grpc_socket {path}; stop it, or choose another path")


def _failure_message(host: str, port: int, flag: str, error: OSError | UnicodeError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; stop it, or choose another {flag}"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"cannot listen on {host} port {port}: {reason}; check --host and {flag}"
