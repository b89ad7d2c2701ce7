"""One copy of weights for several workers: which one fills it, which wait or get none, and when it is freed.

Workers that are killed are real processes; the others talk to the broker over the same sockets from this process.
"""

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from waiting import until

from bf16kit.service.peers.channel import Channel
from bf16kit.service.peers.peer import Handler, Message, Peer
from bf16kit.service.workers.weights import LEAST, MOST_COPIES, SharedWeights, WeightBroker

ROOT = Path(__file__).parents[3]
SIZE = (2 << 20) + 100


def fill(memory: NDArray[np.uint8]) -> None:
    memory[:] = np.arange(memory.size) % 251


RIGHT = np.zeros(SIZE, np.uint8)
fill(RIGHT)


def never(memory: NDArray[np.uint8]) -> None:
    raise AssertionError("it is filled already")


class Server:
    """A supervisor's broker, and its channels to workers by name."""

    def __init__(self, most_copies: int) -> None:
        self.broker = WeightBroker(self._tell, most_copies=most_copies)
        self.peers: dict[str, Peer] = {}
        self.heard: list[str] = []  # the kinds of messages from workers, and "died" for an end

    def _tell(self, worker: str, kind: str, body: Mapping[str, Any], files: Sequence[int]) -> None:
        self.peers[worker].tell(kind, body, files)

    def connect(self) -> socket.socket:
        """Return the other end of the channel to a new worker, whose death is noticed."""
        ours, theirs = socket.socketpair()
        name = f"worker {len(self.peers) + 1}"

        def handle(kind: str, message: Message) -> None:
            self.broker.handlers[kind](name, message)
            self.heard.append(kind)

        def died() -> None:
            self.broker.worker_died(name)
            self.heard.append("died")

        handlers: dict[str, Handler] = {kind: partial(handle, kind) for kind in self.broker.handlers}
        peer = self.peers[name] = Peer(Channel(ours), name, handlers, died)
        peer.start()
        return theirs

    def store(self) -> SharedWeights:
        """Return the store of a new worker in this process."""
        handlers: dict[str, Handler] = {"weights": lambda message: made.receive(message)}
        peer = Peer(Channel(self.connect()), "the supervisor", handlers, lambda: None)
        made = SharedWeights(peer.tell)
        peer.start()
        made.start()
        return made

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()  # which ends the worker's uses


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(getattr(request, "param", MOST_COPIES))
    yield server
    server.close()


@pytest.fixture
def store(server: Server) -> SharedWeights:
    return server.store()


def mappings(pid: int | str = "self") -> list[str]:
    """Return the inode numbers of the shared memory that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:bf16kit-weights" in line]


def copies() -> int:
    """Return the number of copies for which this process, in which the broker is, has a file open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            found += "memfd:bf16kit-weights" in str(each.readlink())
    return found


def freed() -> None:
    gc.collect()
    until(lambda: not copies(), what="the copy's end")


WORKER = """
import signal, socket, sys
import numpy as np
from bf16kit.service.peers.channel import Channel
from bf16kit.service.peers.peer import Handler, Peer
from bf16kit.service.workers.weights import SharedWeights
end = Channel(socket.socket(fileno=int(sys.argv[1])))
peer = Peer(end, "the supervisor", {"weights": lambda message: store.receive(message)}, lambda: None)
store = SharedWeights(peer.tell)
peer.start(), store.start()
def fill(memory):
    print("filling", flush=True)
    if sys.argv[2] == "hang":
        signal.pause()
    memory[:] = np.arange(memory.size) % 251
memory = store.get("key", int(sys.argv[3]), fill)
print(int(memory.sum(dtype=np.int64)), flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(server: Server, how: str = "fill") -> Iterator[Popen[str]]:
    """Start a worker that requests ``key``, prints what it does, and keeps the copy until its input ends."""
    with server.connect() as end:
        command = [sys.executable, "-c", WORKER, str(end.fileno()), how, str(SIZE)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started = Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment, pass_fds=[end.fileno()])
    with started:
        try:
            yield started
        finally:
            started.kill()


def said(worker: Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_two_processes_share_one_copy_that_is_freed_with_the_last_use(server: Server, store: SharedWeights) -> None:
    with process(server) as first, process(server) as second:
        heard = [said(first), said(second)]
        heard += [said(first if heard[0] == "filling" else second)]
        total = str(int(RIGHT.sum(dtype=np.int64)))
        assert sorted(heard) == [total, total, "filling"]
        assert len(mappings(first.pid)) == 1
        assert mappings(first.pid) == mappings(second.pid)
        memory = store.get("key", SIZE, never)
        assert mappings() == mappings(first.pid)
    until(lambda: server.heard.count("died") == 2, what="the end of the other uses")
    np.testing.assert_array_equal(memory, RIGHT)
    del memory
    freed()
    assert mappings() == []
    np.testing.assert_array_equal(store.get("key", SIZE, fill), RIGHT)  # it is filled again


def test_weights_are_shared_by_key_and_size_unless_they_are_few(store: SharedWeights) -> None:
    kept = [store.get("key", SIZE, fill), store.get("other", SIZE, fill), store.get("key", LEAST, fill)]
    kept += [store.get("key", SIZE, never), store.get("key", LEAST - 1, fill)]
    for memory in kept:
        np.testing.assert_array_equal(memory, RIGHT[: memory.size])
    assert (copies(), len({*mappings()})) == (3, 3)
    kept.clear()
    del memory
    freed()


def test_one_worker_fills_while_all_others_wait(server: Server) -> None:
    filling, may_end, filled_by = threading.Event(), threading.Event(), []

    def slowly(memory: NDArray[np.uint8]) -> None:
        filled_by.append(threading.current_thread())
        filling.set()
        assert may_end.wait(20)
        fill(memory)

    stores = [server.store() for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        getting = [pool.submit(store.get, "key", SIZE, slowly) for store in (*stores, stores[0])]
        assert filling.wait(20)
        assert not any(each.done() for each in getting)
        np.testing.assert_array_equal(server.store().get("other", SIZE, fill), RIGHT)  # another key does not wait
        may_end.set()
        for each in getting:
            np.testing.assert_array_equal(each.result(20), RIGHT)
    assert len(filled_by) == 1


# --- workers that fail or are killed ----------------------------------------------------------------------------------


def test_if_the_filling_worker_fails_the_next_one_fills(server: Server) -> None:
    begun, may_fail = threading.Event(), threading.Event()

    def badly(memory: NDArray[np.uint8]) -> None:
        memory[:] = 99
        begun.set()
        assert may_fail.wait(20)
        raise RuntimeError("the disk")

    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(server.store().get, "key", SIZE, badly)
        assert begun.wait(20)
        waiting = pool.submit(server.store().get, "key", SIZE, fill)
        may_fail.set()
        with pytest.raises(RuntimeError, match="the disk"):
            failing.result(20)
        np.testing.assert_array_equal(waiting.result(20), RIGHT)
    for _ in range(2):
        with pytest.raises(MemoryError):  # no room
            server.store().get("key", 1 << 60, never)


def test_if_the_filling_worker_is_killed_the_next_that_lives_fills_and_a_killed_one_frees_its_copy(
    server: Server, store: SharedWeights
) -> None:
    with process(server, "hang") as hanging, process(server, "hang") as waiting, ThreadPoolExecutor(1) as pool:
        until(lambda: server.heard == ["weights"] * 2, 60, "both requests")
        third = pool.submit(store.get, "key", SIZE, fill)
        until(lambda: server.heard == ["weights"] * 3, what="the third request")
        for worker in (waiting, hanging):  # in either order
            worker.send_signal(signal.SIGKILL)
        memory = third.result(20)
        np.testing.assert_array_equal(memory, RIGHT)
    with process(server) as user:
        assert said(user).isdecimal()
        del memory, third
        gc.collect()
        until(lambda: "released" in server.heard, what="the end of the other use")
        assert copies() == 1
        user.send_signal(signal.SIGKILL)
        freed()


# --- weights that are not shared --------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [1], indirect=True)
def test_beyond_the_limit_of_copies_each_worker_makes_its_own(
    store: SharedWeights, caplog: pytest.LogCaptureFixture
) -> None:
    kept = store.get("key", SIZE, fill)
    np.testing.assert_array_equal(store.get("other", SIZE, fill), RIGHT)
    assert "copied for this process alone: too many are shared" in caplog.text
    assert len(mappings()) == 1
    del kept
    freed()
    now = store.get("other", SIZE, fill)
    assert len(mappings()) == 1
    np.testing.assert_array_equal(now, RIGHT)


@pytest.mark.parametrize("when", ["filled", "waiting", "later"])
def test_without_a_descriptor_for_the_others_each_makes_its_own(when: str) -> None:
    """Nobody waits for ever, and the copy is freed with the uses that are left."""
    answers: list[tuple[str, str]] = []
    full = False

    def tell(worker: str, kind: str, body: Mapping[str, Any], files: Sequence[int]) -> None:
        if full and files:
            raise OSError(24, "Too many open files")
        answers.append((worker, body["do"]))

    broker = WeightBroker(tell)
    request = {"key": "key", "number": 0}

    def send(kind: str, worker: str, *files: int) -> None:
        broker.handlers[kind](worker, Message(request, files))

    with (Path("/dev/zero")).open() as memory:
        send("weights", "first")
        if when != "later":
            send("weights", "second")
        full = when == "waiting"
        send("filled", "first", -1 if when == "filled" else memory.fileno())  # -1 cannot be duplicated either
        full = when == "later"
        if full:
            send("weights", "second")
    assert answers == [("first", "fill"), ("second", "alone")]
    send("released", "first")
    full = False
    send("weights", "third")
    assert answers[2:] == [("third", "fill")]
