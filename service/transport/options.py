"""How much a server holds, and how long it waits for clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Where to listen, how much to hold, and how long to wait for clients. A call has its place or is refused.

    ``share_port`` lets several worker processes listen on one port (SO_REUSEPORT).
    """

    host: str = "127.0.0.1"
    port: int = 8001  # 0 = any free port
    unix_socket: str = ""  # a path to listen on as well, without TLS: the file's directory says who may connect
    max_in_flight: int = 256
    max_streams: int = 64
    max_watches: int = 1024
    max_connections: int = 4096
    compress: bool = False  # responses, with gzip, for clients that take it
    stream_window: int = 16  # requests of one stream at work at once
    max_message_bytes: int = 64 << 20  # of a request
    max_request_bytes: int = 512 << 20  # of all requests and answers together
    receive_seconds: float = 10.0  # for a request to arrive, once its headers have
    send_seconds: float = 30.0  # for a client to take a response
    stream_idle_seconds: float = 600.0  # for the next request of a stream that waits for none of its responses
    keepalive_seconds: float = 60.0  # of silence, after which the client is asked whether it is there
    max_connection_idle_seconds: float = 1800.0
    max_connection_age_seconds: float = 0.0  # 0 = no limit
    overload: str = "RESOURCE_EXHAUSTED"  # the status code of a refusal for want of room, by name
    share_port: bool = False
