"""The server's limits, and its timeouts for clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Addresses, limits and timeouts. A call beyond a limit is rejected; none waits for a place.

    ``share_port`` lets several worker processes listen on one port (SO_REUSEPORT).
    """

    host: str = "127.0.0.1"
    port: int = 8001  # 0 = any free port
    # Path of a further socket, without TLS: the permissions of its directory decide who may connect.
    unix_socket: str = ""
    max_in_flight: int = 256
    max_streams: int = 64
    max_watches: int = 1024
    max_connections: int = 4096
    compress: bool = False  # compress responses with gzip, for clients that accept it
    stream_window: int = 16  # requests of one stream in flight
    max_message_bytes: int = 64 << 20  # of a request
    max_request_bytes: int = 512 << 20  # of all requests and responses together
    receive_seconds: float = 10.0  # for a request to arrive, once its headers have
    send_seconds: float = 30.0  # for a client to read a response
    stream_idle_seconds: float = 600.0  # for the next request of a stream without requests in flight
    keepalive_seconds: float = 60.0  # silence after which the client is pinged
    max_connection_idle_seconds: float = 1800.0
    max_connection_age_seconds: float = 0.0  # 0 = no limit
    overload: str = "RESOURCE_EXHAUSTED"  # name of the status code that rejects a call for lack of room
    share_port: bool = False
