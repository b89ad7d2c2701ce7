"""Clients attack the server through their shared memory: it responds or rejects, survives, and touches nothing else."""

import functools
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import figures
import numpy as np
import pytest
import tritonclient.grpc as triton
from attacked import Target
from figures import amount
from tritonclient.utils import InferenceServerException
from waiting import repeating

pytestmark = pytest.mark.hostile

SHM = Path("/dev/shm")
PREFIX = f"hostile-{os.getpid()}-"
X = np.linspace(-1, 1, 32 * 16, dtype=np.float32).reshape(32, 16)
REFUSED = "StatusCode.INVALID_ARGUMENT"


Make = Callable[[str, bytes], Path]


@pytest.fixture(scope="module")
def target(attack: Callable[..., Target]) -> Target:
    return attack(f"shared_memory: {PREFIX}\n")


@pytest.fixture
def client(target: Target) -> Iterator[Any]:
    with triton.InferenceServerClient(target.address) as client:
        client.unregister_system_shared_memory()
        yield client


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Path] = []

    def file(name: str, content: bytes) -> Path:
        made.append(SHM / f"{PREFIX}{name}")
        made[-1].write_bytes(content)
        return made[-1]

    yield file
    for path in made:
        path.unlink(missing_ok=True)


def ask(client: Any, *, source: str = "r", sink: str = "") -> Any:
    """Return the output in the message; None if it goes to ``sink``."""
    x = triton.InferInput("x", list(X.shape), "FP32")
    x.set_shared_memory(source, X.nbytes)
    y = triton.InferRequestedOutput("y")
    if sink:
        y.set_shared_memory(sink, X.nbytes)
    result = client.infer("mlp", [x], outputs=[y])
    return None if sink else result.as_numpy("y")


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except InferenceServerException as refused:
        return str(refused.status())
    return "OK"


@pytest.mark.parametrize("shrunk", [0, 1, X.nbytes - 1])
def test_memory_that_shrinks_and_grows_all_the_time_neither_crashes_nor_is_extended(
    target: Target, client: Any, make: Make, shrunk: int
) -> None:
    source, sink = make("source", X.tobytes()), make("sink", bytes(X.nbytes))
    for path in (source, sink):
        client.register_system_shared_memory(path.name, path.name, X.nbytes)

    def shrink() -> None:
        for size in (shrunk, X.nbytes):
            os.truncate(source, size)
            os.truncate(sink, size)

    outcomes: Counter[str] = Counter()
    with target.stays_healthy(), repeating(shrink):
        for _ in range(amount(300, 20_000)):
            outcomes[outcome(lambda: ask(client, source=source.name, sink=sink.name))] += 1
            assert sink.stat().st_size <= X.nbytes
    figures.record(**outcomes)
    assert outcomes.keys() <= {"OK", REFUSED}
    for path in (source, sink):
        os.truncate(path, 0)
    assert outcome(lambda: ask(client, source=source.name, sink=sink.name)) == REFUSED
    assert (source.stat().st_size, sink.stat().st_size) == (0, 0)


def test_a_region_registered_again_meanwhile_gives_the_output_of_either_file(
    target: Target, client: Any, make: Make
) -> None:
    contents = [X, -X]
    files = [make(f"file{i}", content.tobytes()) for i, content in enumerate(contents)]
    expected = []
    for path in files:
        client.register_system_shared_memory("r", path.name, X.nbytes)
        expected.append(ask(client))
        client.unregister_system_shared_memory("r")
    turn = iter(range(10**9))

    def register_anew() -> None:
        with triton.InferenceServerClient(target.address) as other:
            for _ in range(50):
                other.unregister_system_shared_memory("r")
                other.register_system_shared_memory("r", files[next(turn) % 2].name, X.nbytes)

    outcomes: Counter[str] = Counter()
    with target.stays_healthy(), repeating(register_anew):
        for _ in range(amount(300, 20_000)):
            answers: list[Any] = []
            outcomes[outcome(lambda answers=answers: answers.append(ask(client)))] += 1  # type: ignore[misc]
            for answer in answers:
                assert any(np.allclose(answer, right, rtol=1e-4, atol=1e-5) for right in expected)
    figures.record(**outcomes)
    assert outcomes["OK"] > 0
    assert outcomes.keys() <= {"OK", "StatusCode.NOT_FOUND"}


def test_keys_that_are_not_permitted_plain_files_all_get_the_same_error(
    target: Target, client: Any, make: Make, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4096))
    own, folder = make("own", bytes(4096)), SHM / f"{PREFIX}folder"
    (SHM / f"{PREFIX}link").symlink_to(secret)
    (SHM / f"{PREFIX}here").symlink_to(own.name)
    folder.mkdir()
    os.mkfifo(SHM / f"{PREFIX}pipe")
    os.link(own, SHM / f"{PREFIX}twice")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(SHM / f"{PREFIX}socket"))
    try:
        told = set()
        with target.stays_healthy():
            for name in ("link", "here", "folder", "pipe", "twice", "socket", "none", "x" * 300, "folder/x"):
                key = f"{PREFIX}{name}"
                with pytest.raises(InferenceServerException) as refused:
                    client.register_system_shared_memory("r", key, 64)
                assert refused.value.status() == REFUSED
                told.add(str(refused.value.message()).partition(" cannot be used")[2])
            for key in ("../etc/passwd", "/etc/passwd", "..", "", "/", "other", f"../shm/{own.name}", f"{own.name}\0"):
                assert outcome(functools.partial(client.register_system_shared_memory, "r", key, 64)) == REFUSED
        assert len(told) == 1
    finally:
        listening.close()
        folder.rmdir()
        for name in ("link", "here", "pipe", "twice", "socket"):
            (SHM / f"{PREFIX}{name}").unlink()


@pytest.mark.parametrize("number", [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 1])
def test_sizes_and_offsets_beyond_all_bounds_are_rejected(target: Target, client: Any, make: Make, number: int) -> None:
    path = make("small", bytes(4096))
    client.register_system_shared_memory("r", path.name, 4096)
    x = triton.InferInput("x", list(X.shape), "FP32")
    with target.stays_healthy():
        for offset, size in ((number, 1), (0, number), (number, number), (4096 - 1, number)):
            register = functools.partial(client.register_system_shared_memory, "other", path.name, size, offset)
            assert outcome(register) == REFUSED
            place = x._get_tensor().parameters  # noqa: SLF001 -- its methods check the numbers
            place["shared_memory_region"].string_param = "r"
            place["shared_memory_offset"].uint64_param = offset
            place["shared_memory_byte_size"].uint64_param = size
            assert outcome(lambda: client.infer("mlp", [x])) == REFUSED
    assert path.read_bytes() == bytes(4096)


def test_the_number_of_regions_is_limited_and_their_files_are_closed_again(
    target: Target, client: Any, make: Make
) -> None:
    path, process = make("many", bytes(1 << 20)), target.process.process.pid
    before = len(list(Path(f"/proc/{process}/fd").iterdir()))
    with target.stays_healthy():
        register = functools.partial(client.register_system_shared_memory, key=path.name, byte_size=4096)
        outcomes = Counter(outcome(functools.partial(register, f"r{number}")) for number in range(1100))
        assert outcomes == {"OK": 1024, "StatusCode.RESOURCE_EXHAUSTED": 76}
        client.unregister_system_shared_memory()
    assert len(list(Path(f"/proc/{process}/fd").iterdir())) < before + 100
    assert path.name not in Path(f"/proc/{process}/maps").read_text()
    grown = make("sparse", b"")
    os.truncate(grown, 2 << 30)
    assert outcome(lambda: client.register_system_shared_memory("r", grown.name, 2 << 30)).endswith("EXHAUSTED")


def test_error_messages_reveal_no_other_region_or_file(target: Target, client: Any, make: Make) -> None:
    """Triton's error for a request that is too large contained the name of one of its own regions (CVE-2025-23320)."""
    theirs, mine = make("of-another", bytes(4096)), make("mine", bytes(4096))
    client.register_system_shared_memory("another", theirs.name, 4096)
    client.register_system_shared_memory("mine", mine.name, 4096)
    large = triton.InferInput("x", [1 << 40, 16], "FP32")
    large.set_shared_memory("mine", 1 << 46)
    register = client.register_system_shared_memory
    requests: list[tuple[str, Callable[[], object]]] = [
        (REFUSED, lambda: client.infer("mlp", [large])),
        ("StatusCode.NOT_FOUND", lambda: ask(client, source="missing")),
        ("StatusCode.NOT_FOUND", lambda: client.get_system_shared_memory_status("missing")),
        (REFUSED, lambda: register("new", f"{PREFIX}missing", 64)),
        (REFUSED, lambda: register("new", mine.name, 1 << 20)),
        ("StatusCode.ALREADY_EXISTS", lambda: register("mine", mine.name, 64)),
    ]
    for status, send in requests:
        with pytest.raises(InferenceServerException) as refused:
            send()
        assert refused.value.status() == status
        assert "another" not in str(refused.value.message())
    with pytest.raises(InferenceServerException, match="is registered already") as refused:
        register("another", mine.name, 64)
    assert theirs.name not in str(refused.value.message())
