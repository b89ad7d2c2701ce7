"""One copy of weights for several processes: which client fills it, which wait or get none, and when it is freed.

Clients that are killed are real processes; the others talk to the owner over the same sockets from this process.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import artifacts
import numpy as np
import pytest
from numpy.typing import NDArray
from waiting import until

from bf16kit.artifact.artifact import Artifact
from bf16kit.runtime.loading import load
from bf16kit.runtime.memory import weightstore
from bf16kit.runtime.memory.weightstore import create_filled
from bf16kit.runtime.ort.kernel import LIBRARY
from service.workers.weightowner import FILL, FILLED, HERE, REFUSED, REQUEST, WeightOwner
from service.workers.weights import LEAST, SharedWeights

ROOT = Path(__file__).parents[3]
SIZE = (2 << 20) + 100
Fill = Callable[[NDArray[np.uint8]], None]


def fill(memory: NDArray[np.uint8]) -> None:
    memory[:] = np.arange(memory.size) % 251


RIGHT = np.zeros(SIZE, np.uint8)
fill(RIGHT)


def never(memory: NDArray[np.uint8]) -> None:
    raise AssertionError("it is filled already")


@pytest.fixture
def owner() -> Iterator[WeightOwner]:
    owner = WeightOwner()
    owner.start()
    yield owner
    owner.close()


@pytest.fixture
def client(owner: WeightOwner) -> Iterator[Callable[..., SharedWeights]]:
    """Yield a function that creates a client in this process."""
    with ExitStack() as stack:
        yield lambda **more: SharedWeights(stack.enter_context(owner.connect()), **more)


@pytest.fixture
def store(client: Callable[..., SharedWeights]) -> SharedWeights:
    return client()


def mappings(pid: int | str = "self") -> list[str]:
    """Return the inode numbers of the shared memory that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:bf16kit-weights" in line]


def open_descriptors() -> int:
    """Return the number of file descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


PROCESS = """
import os, signal, socket, sys
import numpy as np
from service.workers.weights import SharedWeights
store = SharedWeights(socket.socket(fileno=int(sys.argv[1])))
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
def process(owner: WeightOwner, how: str = "fill") -> Iterator[subprocess.Popen[str]]:
    """Start another client, which requests ``key``, prints what it does, and keeps the copy until its input ends."""
    with owner.connect() as theirs:
        command = [sys.executable, "-c", PROCESS, str(theirs.fileno()), how, str(SIZE)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
    with started:
        try:
            yield started
        finally:
            started.kill()


def said(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline().strip()


# --- sharing ----------------------------------------------------------------------------------------------------------


def test_two_processes_share_one_copy_that_is_freed_with_the_last(owner: WeightOwner, store: SharedWeights) -> None:
    with process(owner) as first, process(owner) as second:
        heard = [said(first), said(second)]
        heard += [said(first if heard[0] == "filling" else second)]
        total = str(int(RIGHT.sum(dtype=np.int64)))
        assert sorted(heard) == [total, total, "filling"]
        assert len(mappings(first.pid)) == 1
        assert mappings(first.pid) == mappings(second.pid)
        memory = store.get("key", SIZE, never)
        np.testing.assert_array_equal(memory, RIGHT)
        assert mappings() == mappings(first.pid)
    assert owner.copies == 1
    np.testing.assert_array_equal(memory, RIGHT)
    del memory
    gc.collect()
    until(lambda: not owner.copies, what="the copy's end")
    assert mappings() == []


def test_weights_of_another_key_or_size_are_another_copy(owner: WeightOwner, store: SharedWeights) -> None:
    kept = [store.get("key", SIZE, fill), store.get("other", SIZE, fill), store.get("key", SIZE - 1, fill)]
    assert owner.copies == 3
    assert len({*mappings()}) == 3
    del kept


def test_a_shared_copy_is_read_only_and_aligned_to_a_large_page(store: SharedWeights) -> None:
    for memory in (store.get("key", SIZE, fill), store.get("key", SIZE, never)):
        assert memory.ctypes.data % (2 << 20) == 0
        with pytest.raises(ValueError, match="read-only"):
            memory[0] = 1


def test_a_freed_copy_leaves_no_descriptor_open(owner: WeightOwner, store: SharedWeights) -> None:
    before = open_descriptors()
    kept = [store.get("key", SIZE, fill), store.get("key", SIZE, never)]
    assert open_descriptors() == before + 5  # both ends of each use, and the memory
    kept.clear()
    gc.collect()
    until(lambda: not owner.copies, what="the copy's end")
    assert open_descriptors() == before


def test_a_few_bytes_are_not_shared(owner: WeightOwner, store: SharedWeights) -> None:
    np.testing.assert_array_equal(store.get("key", LEAST - 1, fill), RIGHT[: LEAST - 1])
    assert owner.copies == 0
    kept = store.get("key", LEAST, fill)
    assert owner.copies == 1
    del kept


def test_a_copy_is_filled_again_after_its_last_user_has_gone(owner: WeightOwner, store: SharedWeights) -> None:
    del [store.get("key", SIZE, fill)][:]
    gc.collect()
    until(lambda: not owner.copies, what="the copy's end")
    np.testing.assert_array_equal(store.get("key", SIZE, fill), RIGHT)


def test_one_fills_while_all_others_wait(client: Callable[..., SharedWeights]) -> None:
    filling, may_end, filled_by = threading.Event(), threading.Event(), []

    def slowly(memory: NDArray[np.uint8]) -> None:
        filled_by.append(threading.current_thread())
        filling.set()
        assert may_end.wait(20)
        fill(memory)

    stores = [client() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        getting = [pool.submit(store.get, "key", SIZE, slowly) for store in stores]
        assert filling.wait(20)
        assert not any(each.done() for each in getting)
        other = client().get("other", SIZE, fill)  # weights with another key do not wait
        np.testing.assert_array_equal(other, RIGHT)
        may_end.set()
        for each in getting:
            np.testing.assert_array_equal(each.result(20), RIGHT)
    assert len(filled_by) == 1


@pytest.mark.skipif(not LIBRARY.exists(), reason="the kernel was not built: no C++17 compiler")
def test_runtimes_share_one_copy_that_is_freed_when_all_are_closed(
    tmp_path: Path, owner: WeightOwner, client: Callable[..., SharedWeights]
) -> None:
    """The artifacts have the same bytes, but different names."""
    feeds = {"x": np.linspace(-1, 1, 512, dtype=np.float32).reshape(1, 512)}
    opened = [
        Artifact.open(artifacts.write_product(tmp_path / name / "1", width=512).path, copies=True) for name in "ab"
    ]
    right = load(opened[0], "cpu", threads=1).run(feeds)["y"]
    runtimes = [load(artifact, "cpu", threads=1, weights=client()) for artifact in opened]
    assert owner.copies == 1
    assert len({*mappings()}) == 1
    for runtime in runtimes:
        np.testing.assert_array_equal(runtime.run(feeds)["y"], right)
        runtime.close()
    del runtimes, runtime
    gc.collect()
    until(lambda: not owner.copies, what="the copy's end")
    assert mappings() == []


# --- clients that fail or are killed ----------------------------------------------------------------------------------


def test_if_the_filling_client_fails_the_next_one_fills(client: Callable[..., SharedWeights]) -> None:
    begun, may_fail = threading.Event(), threading.Event()

    def badly(memory: NDArray[np.uint8]) -> None:
        memory[:] = 99
        begun.set()
        assert may_fail.wait(20)
        raise RuntimeError("the disk")

    first, second = client(), client()
    with ThreadPoolExecutor(2) as pool:
        failing = pool.submit(first.get, "key", SIZE, badly)
        assert begun.wait(20)
        waiting = pool.submit(second.get, "key", SIZE, fill)
        may_fail.set()
        with pytest.raises(RuntimeError, match="the disk"):
            failing.result(20)
        np.testing.assert_array_equal(waiting.result(20), RIGHT)


def test_if_the_filling_client_is_killed_the_next_one_fills(owner: WeightOwner, store: SharedWeights) -> None:
    with process(owner, "hang") as hanging, ThreadPoolExecutor(1) as pool:
        assert said(hanging) == "filling"
        waiting = pool.submit(store.get, "key", SIZE, fill)
        assert not waiting.done()
        hanging.send_signal(signal.SIGKILL)
        np.testing.assert_array_equal(waiting.result(20), RIGHT)
    assert owner.copies == 1


def test_a_killed_process_frees_its_copy(owner: WeightOwner) -> None:
    with process(owner) as client:
        assert said(client) == "filling"
        assert said(client).isdecimal()
        assert owner.copies == 1
        client.send_signal(signal.SIGKILL)
        until(lambda: not owner.copies, what="the copy's end")


def test_a_waiting_client_that_has_gone_is_not_asked_to_fill(owner: WeightOwner, store: SharedWeights) -> None:
    with process(owner, "hang") as filling:
        assert said(filling) == "filling"
        with raw(owner, key=hashlib.sha256(b"key").digest()):
            until(lambda: owner.uses == 2, what="the use that waits")
        until(lambda: owner.uses == 1, what="its end")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "key", SIZE, fill)
            filling.send_signal(signal.SIGKILL)
            np.testing.assert_array_equal(waiting.result(20), RIGHT)


def test_weights_without_room_raise_memory_error_each_time(store: SharedWeights) -> None:
    for _ in range(2):
        with pytest.raises(MemoryError, match=r"no room for \d+ MB of weights"):
            store.get("key", 1 << 60, never)


# --- clients that send invalid memory ---------------------------------------------------------------------------------


@contextmanager
def raw(owner: WeightOwner, size: int = SIZE, key: bytes = bytes(32)) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Request a use, and yield the client's socket and that of the use, over which the test may send anything."""
    use, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    use.settimeout(20)
    with owner.connect() as client, use:
        with theirs:
            socket.send_fds(client, [REQUEST.pack(size, key)], [theirs.fileno()])
        yield client, use


def unsealed(missing: str) -> Callable[[], list[int]]:
    def make() -> list[int]:
        descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, SIZE)
        others = {"F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE", "F_SEAL_SEAL"} - {missing}
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in others))
        return [descriptor]

    return make


BAD: dict[str, Callable[[], list[int]]] = {
    "may shrink": unsealed("F_SEAL_SHRINK"),
    "may grow": unsealed("F_SEAL_GROW"),
    "may be written": unsealed("F_SEAL_WRITE"),
    "may get seals": unsealed("F_SEAL_SEAL"),
    "too small": lambda: [create_filled(SIZE - 1, lambda memory: None)],
    "too large": lambda: [create_filled(SIZE + 1, lambda memory: None)],
    "no memory": lambda: [os.open(os.devnull, os.O_RDONLY)],
    "nothing": list,
    "two": lambda: [create_filled(SIZE, fill), create_filled(SIZE, fill)],
    "far too many": lambda: [os.open(os.devnull, os.O_RDONLY) for _ in range(9)],
}


@pytest.mark.parametrize("bad", BAD)
def test_invalid_memory_reaches_no_client_and_the_next_one_fills(owner: WeightOwner, bad: str) -> None:
    with raw(owner) as (_, first), raw(owner) as (_, second):
        assert first.recv(64) == FILL
        until(lambda: owner.uses == 2, what="the second use")
        before = open_descriptors()
        handed = BAD[bad]()
        socket.send_fds(first, [FILLED], handed)
        for descriptor in handed:
            os.close(descriptor)
        assert second.recv(64) == FILL
        assert first.recv(64) == b""
        assert open_descriptors() == before - 1  # the owner is in this process, and has closed its end of that use
        good = create_filled(SIZE, fill)
        socket.send_fds(second, [FILLED], [good])
        os.close(good)
        with raw(owner) as (_, third):
            answer, descriptors, _, _ = socket.recv_fds(third, 64, 4)
            assert answer == HERE
            weightstore.check(descriptors[0], SIZE)
            os.close(descriptors[0])


def test_memory_with_the_wrong_message_is_not_accepted(owner: WeightOwner) -> None:
    with raw(owner) as (_, use):
        assert use.recv(64) == FILL
        good = create_filled(SIZE, fill)
        socket.send_fds(use, [HERE], [good])
        os.close(good)
        assert use.recv(64) == b""
        until(lambda: not owner.copies, what="the copy's end")


def test_only_the_client_that_was_asked_to_fill_may_fill(owner: WeightOwner) -> None:
    with raw(owner) as (_, first), raw(owner) as (_, second):
        assert first.recv(64) == FILL
        other = create_filled(SIZE, lambda memory: None)
        socket.send_fds(second, [FILLED], [other])
        os.close(other)
        assert second.recv(64) == b""
        good = create_filled(SIZE, fill)
        socket.send_fds(first, [FILLED], [good])
        os.close(good)
        with raw(owner) as (_, third):
            answer, descriptors, _, _ = socket.recv_fds(third, 64, 4)
            assert (answer, os.pread(descriptors[0], 3, 250)) == (HERE, bytes([250, 0, 1]))
            os.close(descriptors[0])


@pytest.mark.parametrize("request_", [b"", b"x", REQUEST.pack(1, b"") + b"x"], ids=["empty", "short", "long"])
def test_a_malformed_request_disconnects_its_client_and_no_other(
    owner: WeightOwner, store: SharedWeights, request_: bytes
) -> None:
    with owner.connect() as client, Path(os.devnull).open() as file:
        client.settimeout(20)
        socket.send_fds(client, [request_], [file.fileno()])
        assert client.recv(64) == b""
    np.testing.assert_array_equal(store.get("key", SIZE, fill), RIGHT)


@pytest.mark.parametrize("count", [0, 2])
def test_a_request_without_a_socket_or_with_several_disconnects_its_client(
    owner: WeightOwner, store: SharedWeights, count: int
) -> None:
    use, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with owner.connect() as client, use, theirs:
        client.settimeout(20)
        socket.send_fds(client, [REQUEST.pack(SIZE, bytes(32))], [theirs.fileno()] * count)
        assert client.recv(64) == b""
    np.testing.assert_array_equal(store.get("key", SIZE, fill), RIGHT)


def test_a_request_with_a_file_that_is_no_socket_is_ignored(owner: WeightOwner) -> None:
    with owner.connect() as client, Path(os.devnull).open() as file:
        socket.send_fds(client, [REQUEST.pack(SIZE, bytes(32))], [file.fileno()])
        np.testing.assert_array_equal(SharedWeights(client).get("key", SIZE, fill), RIGHT)


def test_beyond_the_limit_of_uses_each_client_makes_its_own_copy(caplog: pytest.LogCaptureFixture) -> None:
    owner = WeightOwner(most_uses=2)
    owner.start()
    with closing(owner), owner.connect() as socket_:
        store = SharedWeights(socket_)
        kept = [store.get("key", SIZE, fill), store.get("key", SIZE, never)]
        np.testing.assert_array_equal(store.get("key", SIZE, fill), RIGHT)
        assert "the owner serves as many uses as it may" in caplog.text
        with raw(owner) as (_, use):
            assert use.recv(64) == REFUSED
        del kept[1]
        gc.collect()
        until(lambda: owner.uses == 1, what="the end of a use")
        kept.append(store.get("key", SIZE, never))


# --- an owner that has ended, or sends invalid memory -----------------------------------------------------------------


def test_after_the_owners_end_shared_copies_stay_and_new_ones_are_private(
    owner: WeightOwner, store: SharedWeights, caplog: pytest.LogCaptureFixture
) -> None:
    kept = store.get("key", SIZE, fill)
    owner.close()
    np.testing.assert_array_equal(kept, RIGHT)
    np.testing.assert_array_equal(store.get("key", SIZE, fill), RIGHT)
    assert "copied for this process alone: the owner is gone" in caplog.text


def test_a_client_that_waits_when_the_owner_ends_makes_its_own_copy(owner: WeightOwner, store: SharedWeights) -> None:
    with process(owner, "hang") as hanging, ThreadPoolExecutor(1) as pool:
        assert said(hanging) == "filling"
        waiting = pool.submit(store.get, "key", SIZE, fill)
        until(lambda: owner.uses == 2, what="the second use")
        owner.close()
        np.testing.assert_array_equal(waiting.result(20), RIGHT)


def test_a_client_that_fills_when_the_owner_ends_keeps_its_copy(
    owner: WeightOwner, store: SharedWeights, caplog: pytest.LogCaptureFixture
) -> None:
    def and_close(memory: NDArray[np.uint8]) -> None:
        fill(memory)
        owner.close()

    np.testing.assert_array_equal(store.get("key", SIZE, and_close), RIGHT)
    assert "the owner is gone" in caplog.text


def test_waiting_for_the_filling_client_has_a_timeout(
    owner: WeightOwner, client: Callable[..., SharedWeights], caplog: pytest.LogCaptureFixture
) -> None:
    with process(owner, "hang") as hanging:
        assert said(hanging) == "filling"
        np.testing.assert_array_equal(client(patience_s=0.05).get("key", SIZE, fill), RIGHT)
    assert "another process has not filled them in time" in caplog.text


@pytest.mark.parametrize("bad", BAD)
def test_a_client_does_not_use_invalid_memory_from_the_owner(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store = SharedWeights(theirs)
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        getting = pool.submit(store.get, "key", SIZE, fill)
        _, descriptors, _, _ = socket.recv_fds(ours, 64, 4)
        with socket.socket(fileno=descriptors[0]) as use:
            handed = BAD[bad]()
            socket.send_fds(use, [HERE], handed)
            for descriptor in handed:
                os.close(descriptor)
            np.testing.assert_array_equal(getting.result(20), RIGHT)
    assert "copied for this process alone" in caplog.text
    assert mappings() == []
