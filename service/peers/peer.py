"""A peer: another process of this server, which sends messages and requests, and receives them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from bf16kit.messages.errors import Bf16kitError, ConfigError, RequestError, RuntimeFailure, Unavailable
from bf16kit.service.peers.channel import Body, Channel, close_all

_log = logging.getLogger(__name__)
# Bytes of messages not sent yet; a process that leaves more of them unread counts as dead. Each message counts at least
# _LEAST bytes, because it takes an entry in the queue and may hold open files.
MOST_WAITING = 128 << 20
_LEAST = MOST_WAITING // 4096
_QUICK_SECONDS = 20.0  # for what takes no time: a process that does not answer is killed earlier
_ANSWER = "answer"  # the kind of message that answers another
ENDED = "ended"  # the reason of an Unavailable: the process has ended, or has not begun
_INTERNAL = "an unexpected error; the server's log has it"
#: Errors that keep their class between processes; any other arrives as a RuntimeFailure.
_KNOWN: list[type[Bf16kitError]] = [ConfigError, RuntimeFailure, *RequestError.__subclasses__()]
_ERRORS = {each.__name__: each for each in _KNOWN}


@dataclass(frozen=True, slots=True)
class Message:
    """A received message. Its ``files`` are closed when the handler has returned; duplicate a file to keep it."""

    body: Body
    files: tuple[int, ...] = ()


Answer = Mapping[str, Any] | Future[Body] | Future[None] | None
Handler = Callable[[Message], Answer]


class Peer:
    """The conversation with another process. :meth:`start` begins to read and to send.

    ``ended`` is called once, on the reading thread, when the conversation is over. ``handlers``, by the kind of
    message, handle messages and requests in the order in which they came. They run on the reading thread, so they must
    not block: one that needs time returns a future.
    """

    def __init__(self, channel: Channel, name: str, handlers: Mapping[str, Handler], ended: Callable[[], None]) -> None:
        self.name = name
        self._channel = channel
        self._handlers = handlers
        self._ended = ended
        self._outgoing: queue.SimpleQueue[tuple[bytes, list[int]] | None] = queue.SimpleQueue()
        self._waiting = 0  # bytes in _outgoing, and of the message that is being sent
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Body]] = {}
        self._number = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{what}", daemon=True)
            for work, what in ((self._read, "reader"), (self._write, "writer"))
        ]

    def start(self) -> None:
        for thread in reversed(self._threads):  # the writer first: the reader releases everything when it ends
            thread.start()

    def abandon(self) -> None:
        """End the peer instead of starting it, or after :meth:`start` has failed."""
        self.close()
        self._fail_pending()
        self._release()

    def tell(self, kind: str, body: Mapping[str, Any] | None = None, files: Sequence[int] = ()) -> None:
        """Send a message without waiting, unless the peer has ended.

        ``files`` are duplicated. Raises OSError if no descriptor is left for that.
        """
        self._send({"kind": kind, "body": {} if body is None else body}, files)

    def ask(self, kind: str, body: Mapping[str, Any] | None = None, files: Sequence[int] = ()) -> Future[Body]:
        """Send a request as :meth:`tell` does, and return a future of its answer.

        It fails with the other side's error, with Unavailable if the peer ends first, or with :meth:`tell`'s OSError.
        """
        future: Future[Body] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(self._gone())
                return future
            self._number += 1
            number = self._number
            self._pending[number] = future
        try:
            self._send({"kind": kind, "body": {} if body is None else body, "ask": number}, files)
        except OSError as error:
            with self._lock:
                unsent = self._pending.pop(number, None)
            if unsent is not None:
                unsent.set_exception(error)
        return future

    def close(self) -> None:
        """End the peer, from any thread.

        Requests without an answer fail on the reading thread: this one may hold a lock that a callback waits for.
        """
        with self._lock:
            self._closed = True
        self._channel.close()
        self._outgoing.put(None)

    def _fail_pending(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(self._gone())

    def _gone(self) -> Unavailable:
        return Unavailable(f"{self.name} of this server has ended; try again", ENDED)

    def _send(self, message: Body, files: Sequence[int]) -> None:
        text = json.dumps(message, separators=(",", ":")).encode()
        size = max(_LEAST, len(text))
        with self._lock:
            if self._closed:
                return
            if not self._waiting or self._waiting + size <= MOST_WAITING:
                self._outgoing.put((text, [os.dup(file) for file in files]))
                self._waiting += size
                return
        _log.error("%s does not read its messages; closing the connection", self.name)
        self.close()

    # --- the threads --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while (waiting := self._outgoing.get()) is not None:
            text, files = waiting
            try:
                self._channel.send(text, files)
            except OSError:
                self.close()
            finally:
                close_all(files)
            with self._lock:
                self._waiting -= max(_LEAST, len(text))
            if self._closed:
                break

    def _read(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                body, files = received
                try:
                    self._handle(body, tuple(files))
                finally:
                    close_all(files)
        except ConnectionError as error:
            _log.debug("%s: %s", self.name, error)
        except Exception:  # noqa: BLE001 -- whoever waits for the other side must learn that nothing more comes
            _log.exception("%s: reading its messages failed", self.name)
        finally:
            self.close()
            self._fail_pending()
            self._release()
            self._ended()

    def _release(self) -> None:
        """Free what is open here, once the writing thread has ended."""
        if self._threads[1].ident is not None:
            self._threads[1].join()
        with contextlib.suppress(queue.Empty):
            while True:
                left = self._outgoing.get_nowait()
                close_all(() if left is None else left[1])
        self._channel.release()

    def _handle(self, message: Body, files: tuple[int, ...]) -> None:
        kind, number = str(message.get("kind")), message.get("ask")
        if kind == _ANSWER:
            self._on_answer(message)
            return
        try:
            if kind not in self._handlers:
                raise Unavailable(f"no handler for {kind!r} here")
            answer = self._handlers[kind](Message(message["body"], files))
        except Exception as error:  # noqa: BLE001 -- one message that fails must not end the conversation
            self._reply(number, kind, error=error)
            return
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: self._reply_later(number, kind, done))
        else:
            self._reply(number, kind, answer)

    def _reply_later(self, number: int | None, kind: str, done: Future[Any]) -> None:
        error = done.exception()
        self._reply(number, kind, None if error else done.result(), error)

    def _reply(
        self, number: int | None, kind: str, body: Mapping[str, Any] | None = None, error: BaseException | None = None
    ) -> None:
        if error is not None and not isinstance(error, Bf16kitError):
            _log.error("%s: %r failed", self.name, kind, exc_info=error)
        elif error is not None and number is None:  # no one waits for the answer
            _log.warning("%s", error)
        if number is not None:
            answer = {"body": body or {}} if error is None else {"error": error_as_json(error)}
            self._send({"kind": _ANSWER, "to": number, **answer}, ())

    def _on_answer(self, message: Body) -> None:
        with self._lock:
            future = self._pending.pop(message.get("to", -1), None)
        if future is None:
            return
        if "error" in message:
            future.set_exception(error_from_json(message["error"]))
        else:
            future.set_result(message["body"])


def when_received(response: Future[Body], receive: Callable[[Body], object]) -> Future[None]:
    """Return a future that ends once ``receive`` has had the response. A request that failed is left out."""
    received: Future[None] = Future()

    def finish(done: Future[Body]) -> None:
        try:
            if done.exception() is None:
                receive(done.result())
        finally:
            received.set_result(None)

    response.add_done_callback(finish)
    return received


def answers(pending: Mapping[str, Future[Body]]) -> dict[str, Body]:
    """Wait for the answers of several processes, by name. Those of processes that died meanwhile are left out.

    Raises the first error of one that still runs, or Unavailable if one does not answer.
    """
    done, late = wait(pending.values(), _QUICK_SECONDS)
    errors = [error for future in done if (error := future.exception()) is not None and not died(error)]
    if errors:
        raise errors[0]
    if late:
        raise Unavailable("a process of this server did not answer; try again")
    return {name: future.result() for name, future in pending.items() if future.exception() is None}


def died(error: BaseException) -> bool:
    """Whether ``error`` says that a process ended before it answered, or had not started."""
    return isinstance(error, Unavailable) and error.reason == ENDED


def error_as_json(error: BaseException) -> Body:
    """Return the error as JSON. The text of an unexpected error (a bug) is left out."""
    if not isinstance(error, Bf16kitError):
        return {"error": RuntimeFailure.__name__, "text": _INTERNAL}
    known = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS), RuntimeFailure.__name__)
    return {"error": known, "text": str(error), "reason": getattr(error, "reason", "")}


def error_from_json(fields: Mapping[str, str]) -> Bf16kitError:
    """Return the error that :func:`error_as_json` wrote, with its class."""
    error = _ERRORS.get(fields.get("error", ""), RuntimeFailure)(fields.get("text", ""))
    if fields.get("reason"):
        error.reason = fields["reason"]  # type: ignore[attr-defined]
    return error
