"""``bf16kit.serve``: the real server in a child process, for tests and notebooks."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from os import PathLike
from typing import IO, Any

from bf16kit.converter.process import program
from bf16kit.messages.errors import RuntimeFailure, UsageError
from bf16kit.service.config.serverconfig import ENV_PREFIX, ServerConfig, load_config

_BANNER = re.compile(r"gRPC on \S+ port (\d+); metrics and status page on (https?)://\S+:(\d+)/")
_LINES = 15  # of the log, in an error
_LAST_SECONDS = 10.0  # for the end of a process, after the drain


class Server:
    """A running server, which ends with the ``with`` block, with :meth:`stop`, and with the process that started it.

    ``grpc_address`` is ``127.0.0.1:PORT``, as tritonclient takes it; ``http_address`` is the URL of the status page,
    ``/metrics`` and ``/readyz``.
    """

    def __init__(self, config: ServerConfig) -> None:
        given = {key: getattr(config, key) for key in config.model_fields_set}
        texts = {key: value if isinstance(value, str) else _text(value) for key, value in given.items()}
        command = program.command(
            "bf16kit.system.exit_with_parent", str(os.getpid()), *program.command("bf16kit.service")
        )
        self._config = config
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=program.environment() | {ENV_PREFIX + key.upper(): text for key, text in texts.items()},
        )
        self._finish = weakref.finalize(self, _end, self.process, config.drain_seconds + _LAST_SECONDS, self._log)
        self._text = ""

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until all models are loaded; RuntimeFailure, with the log's last lines, if it ends or takes longer."""
        late = time.monotonic() + seconds
        while not self._ready():
            ended, time_is_up = self.process.poll(), time.monotonic() > late
            if ended is not None or time_is_up:
                what = f"is not ready after {seconds:g} s" if ended is None else f"ended with exit code {ended}"
                self.stop()
                raise RuntimeFailure(
                    "\n  ".join([f"the server {what}; its log ends:", *self.log.splitlines()[-_LINES:]])
                )
            time.sleep(0.05)

    def _ready(self) -> bool:
        found = _BANNER.search(self.log)
        if found is None:
            return False
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._config.host, self._config.host)  # noqa: S104
        self.grpc_address, self.http_address = f"{host}:{found[1]}", f"{found[2]}://{host}:{found[3]}"
        unverified = ssl._create_unverified_context()  # noqa: S323 - it asks its own child
        try:
            with urllib.request.urlopen(f"{self.http_address}/readyz", timeout=5, context=unverified):  # noqa: S310
                return True
        except (urllib.error.URLError, OSError):
            return False

    @property
    def log(self) -> str:
        """What the server has logged so far, or until it ended."""
        if not self._log.closed:
            size = os.fstat(self._log.fileno()).st_size
            self._text = os.pread(self._log.fileno(), size, 0).decode(errors="replace")
        return self._text

    def client(self, **options: Any) -> Any:
        """Return a ``tritonclient.grpc.InferenceServerClient`` of this server; UsageError if it is not installed."""
        try:
            from tritonclient.grpc import InferenceServerClient
        except ImportError:
            raise UsageError("client() needs tritonclient: pip install 'tritonclient[grpc]'") from None
        return InferenceServerClient(self.grpc_address, **options)

    def stop(self) -> int:
        """End the server, answering what is in flight, and return its exit code."""
        _end(self.process, self._config.drain_seconds + _LAST_SECONDS)
        self.log  # noqa: B018 - to be there afterwards
        self._finish()
        return self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        ended = self.process.poll()
        state = f"gRPC on {self.grpc_address}, status page {self.http_address}/" if ended is None else "ended"
        return f"<bf16kit server of {str(self._config.repository)!r}: {state}>"


def serve(repository: str | PathLike[str], *, ready_seconds: float = 120.0, **config: Any) -> Server:
    """Serve the artifacts in ``repository`` from a child process on free loopback ports, and wait until it is ready.

    ``config`` are keys of ``server.yaml``, such as ``model_control="explicit"`` or ``grpc_port=8001``:
    docs/configuration.md has all. The child ends when the thread that called ``serve`` does. Raises
    :class:`ConfigError`, a :class:`UsageError`, for a wrong key or value, and :class:`RuntimeFailure`, with the log's
    last lines, if the server ends or is not ready after ``ready_seconds``.

    >>> with bf16kit.serve("repository") as server:
    ...     server.client().is_model_ready("mlp")
    True
    """
    server = Server(load_config({"grpc_port": 0, "http_port": 0, **config, "repository": os.fspath(repository)}))
    server.wait_until_ready(ready_seconds)
    return server


def _text(value: object) -> str:
    """Return ``value`` as a variable of the environment holds it."""
    return str(value) if isinstance(value, PathLike) else json.dumps(value)


def _end(process: subprocess.Popen[bytes], seconds: float, log: IO[bytes] | None = None) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if log is not None:
        log.close()
