"""Any order of registrations, uses, and changes of the files underneath, with a supervisor and two workers.

The model is a bytearray per file and two dictionaries. After every step each file holds the model's bytes, so nothing
was written outside a leased range and no file grew; and the process has those files open that a registration or a
lease needs, and no other. Each of these planted faults was found:

| fault | found as |
|---|---|
| `SharedFile.write` does not ask for the file's size | a shrunk file grows again |
| `SharedFile.read` leaves out the region's offset | other bytes are read |
| `RegionTable.lease` compares only the size with the region's | a slice ends beyond its region |
| `unregister` keeps the file in a list | the file stays open |
| `RegionTable.adopt` demands all bytes | a restarted worker lacks the region of a shrunk file |
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from machinesettings import machine_settings

from bf16kit.messages.errors import AlreadyExists, Bf16kitError, InvalidRequest, NotFound, Overloaded
from bf16kit.service.operations import Region, RegionSlice
from bf16kit.service.peers.channel import Body
from bf16kit.service.regions import DIRECTORY, RegionTable
from bf16kit.service.workers.forwarding import FleetRegions

PAGE = mmap.PAGESIZE
PREFIX, MOST_REGIONS, MOST_BYTES = "bf16kit", 2, 3 * PAGE
FILES = st.sampled_from(["bf16kit", "bf16kit-a"])
NAMES = st.sampled_from(["r", "s", "t"])
TABLES = st.integers(0, 2)  # 0: the supervisor's
SIZES = st.sampled_from([64, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
BORDERS = st.sampled_from([0, 1, 63, 64, 65, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2**63, 2**64 - 1, -1])
BYTES = st.integers(0, 255)
HOW = st.sampled_from(["cut a byte", "cut half", "empty", "restore", "lengthen"])


@dataclass(eq=False)
class Content:
    """A file that was once in the directory; the model of what is in it."""

    path: Path | None  # None once another file has its name, or none
    inode: int
    data: bytearray
    first_size: int
    links: int = 1


@dataclass(eq=False)
class Hold:
    """One table's hold on a range of a file."""

    region: Region
    content: Content


@dataclass(eq=False)
class Lease:
    real: RegionSlice
    hold: Hold
    at: int  # in the file
    byte_size: int

    @property
    def is_whole(self) -> bool:
        return not self.byte_size or self.at + self.byte_size <= len(self.hold.content.data)


@dataclass
class Process:
    """A process with a table, and what the model expects in it."""

    real: RegionTable
    known: dict[str, Hold] = field(default_factory=dict)


def refusal(call: Callable[[], object]) -> type[Bf16kitError] | None:
    try:
        call()
    except Bf16kitError as error:
        return type(error)
    return None


class SharedRegions(RuleBasedStateMachine):
    contents = Bundle("contents")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="bf16kit-machine-", dir=DIRECTORY))
        self.device = self.directory.stat().st_dev
        self.files: list[Content] = []
        self.held: list[Lease] = []
        self.processes = [self._process() for _ in range(3)]
        self.fleet = FleetRegions(self.processes[0].real, self._ask)

    def _process(self) -> Process:
        return Process(RegionTable(PREFIX, self.directory, regions=MOST_REGIONS, nbytes=MOST_BYTES))

    def _ask(self, kind: str, body: Mapping[str, Any], files: Sequence[int] = ()) -> dict[str, Future[Body]]:
        done: Future[Body] = Future()
        done.set_result({})
        for worker in self.processes[1:]:
            self._follow(worker, kind, body, files)
        return {str(at): done for at in (1, 2)}

    def _follow(self, worker: Process, kind: str, body: Mapping[str, Any], files: Sequence[int]) -> None:
        if kind == "adopt":
            worker.real.adopt(Region(**body), files[0])
        else:
            worker.real.unregister(body["name"])

    def _at(self, name: str) -> Content | None:
        return next((each for each in self.files if each.path is not None and each.path.name == name), None)

    @initialize(target=contents, size=SIZES, offset=st.sampled_from([0, 63]))
    def begin(self, size: int, offset: int) -> Content:
        content = self._create("bf16kit", size)
        self._register(Region("r", "bf16kit", offset, size - offset))
        return content

    # --- the client's files ------------------------------------------------------------------------------------------

    @rule(target=contents, name=FILES, size=SIZES, seed=BYTES)
    def replace(self, name: str, size: int, seed: int) -> Content:
        return self._create(name, size, seed)

    def _create(self, name: str, size: int, seed: int = 0) -> Content:
        """Create a file, or put another one in its place, as rename() does."""
        data = bytearray((seed + at * 7) % 251 for at in range(size))
        (self.directory / "new").write_bytes(data)
        for replaced in self.files:
            if replaced.path == self.directory / name:
                replaced.path = None
        (self.directory / "new").rename(self.directory / name)
        self.files.append(Content(self.directory / name, (self.directory / name).stat().st_ino, data, size))
        return self.files[-1]

    @rule(content=contents, how=HOW)
    def resize(self, content: Content, how: str) -> None:
        if content.path is not None:
            size = len(content.data)
            sizes = {"cut a byte": max(0, size - 1), "cut half": size // 2, "empty": 0, "lengthen": size + 1}
            size = sizes.get(how, content.first_size)
            os.truncate(content.path, size)
            del content.data[size:]
            content.data.extend(bytes(size - len(content.data)))

    @rule(content=contents, byte=BYTES, how=st.sampled_from(["fill", "unlink", "link"]))
    def change(self, content: Content, byte: int, how: str) -> None:
        """Write all of the file, or remove it, or give it a second name or take that away again."""
        if content.path is None:
            return
        other = self.directory / f"other-{content.inode}"
        if how == "unlink":
            content.path.unlink()
            content.path = None
        elif how == "fill":
            content.data[:] = bytes([byte]) * len(content.data)
            with content.path.open("r+b") as file:
                file.write(content.data)
        elif content.links == 1:
            other.hardlink_to(content.path)
            content.links = 2
        else:
            other.unlink()
            content.links = 1

    # --- registrations -----------------------------------------------------------------------------------------------

    @rule(
        name=NAMES,
        content=contents,
        slash=st.sampled_from(["", "/"]),
        offset=st.sampled_from([0, 0, 63, PAGE]),
        left=st.sampled_from([0, 0, 1, -1]),
    )
    def register(self, name: str, content: Content, slash: str, offset: int, left: int) -> None:
        if content.path is not None:
            self._register(Region(name, slash + content.path.name, offset, len(content.data) - offset - left))

    @rule(
        name=NAMES | st.sampled_from(["", "x" * 255, "x" * 256]),
        key=FILES | st.sampled_from(["", ".", "..", "other", "bf16ki", "none", "bf16kit/", "/../bf16kit", "bf16kit\0"]),
        offset=BORDERS,
        size=BORDERS,
    )
    def register_odd(self, name: str, key: str, offset: int, size: int) -> None:
        self._register(Region(name, key, offset, size))

    def _register(self, region: Region) -> None:
        supervisor, content = self.processes[0], self._at(region.key.removeprefix("/"))
        in_use = sum(each.region.byte_size for each in supervisor.known.values())
        reasons: dict[type[Bf16kitError], bool] = {
            AlreadyExists: region.name in supervisor.known,
            InvalidRequest: not 1 <= len(region.name) <= 255
            or region.offset < 0
            or region.byte_size < 1
            or content is None
            or content.links > 1
            or region.offset + region.byte_size > len(content.data),
            Overloaded: len(supervisor.known) == MOST_REGIONS or in_use + region.byte_size > MOST_BYTES,
        }
        found = refusal(lambda: self.fleet.register(region))
        assert (found is None) == (not any(reasons.values())), (region, reasons)
        assert found is None or reasons[found]
        if found is None:
            assert content is not None
            for process in self.processes:
                process.known[region.name] = Hold(region, content)

    @precondition(lambda self: self.processes[0].known)
    @rule(name=NAMES, every=st.sampled_from([False, False, True]))
    def unregister(self, name: str, every: bool) -> None:
        name = "" if every else name
        self.fleet.unregister(name)
        for process in self.processes:
            if name:
                process.known.pop(name, None)
            else:
                process.known.clear()

    @rule(number=st.integers(1, 2))
    def restart_worker(self, number: int) -> None:
        """A worker is replaced, whatever has happened to the files' names; its leases end with it."""
        worker = self.processes[number] = self._process()
        self.fleet.tell_all(_Peer(lambda *message: self._follow(worker, *message)))  # type: ignore[arg-type]
        worker.known = {name: Hold(each.region, each.content) for name, each in self.processes[0].known.items()}

    # --- requests ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.processes[0].known)
    @rule(target=leases, table=TABLES, which=BYTES, first=st.sampled_from([0, 1]), left=st.sampled_from([0, 0, 1, -1]))
    def lease(self, table: int, which: int, first: int, left: int) -> Any:
        known = self.processes[table].known
        name = sorted(known)[which % len(known)]
        return self._lease(table, name, first, known[name].region.byte_size - left - first)

    @rule(target=leases, table=TABLES, name=NAMES, offset=BORDERS, size=BORDERS)
    def lease_odd(self, table: int, name: str, offset: int, size: int) -> Any:
        return self._lease(table, name, offset, size)

    def _lease(self, table: int, name: str, offset: int, size: int) -> Any:
        process = self.processes[table]
        hold, made = process.known.get(name), list[RegionSlice]()
        found = refusal(lambda: made.append(process.real.lease(name, offset, size)))
        if hold is None:
            assert found is NotFound
        elif offset < 0 or size < 0 or offset + size > hold.region.byte_size:
            assert found is InvalidRequest
        else:
            assert found is None
            self.held.append(Lease(made.pop(), hold, hold.region.offset + offset, size))
            return self.held[-1]
        return multiple()

    @rule(lease=leases, more=st.sampled_from([0, 0, -1, 1, -64]), byte=BYTES)
    def use(self, lease: Lease, more: int, byte: int) -> None:
        """Read the slice, write about as many bytes, and read it again."""
        self._read(lease)
        size = max(0, lease.byte_size + more)
        data = np.full((2, size), byte, np.uint8)[1]
        is_allowed = size <= lease.byte_size and (not size or lease.at + size <= len(lease.hold.content.data))
        assert refusal(lambda: lease.real.write(data)) is (None if is_allowed else InvalidRequest)
        if is_allowed:
            lease.hold.content.data[lease.at : lease.at + size] = data.tobytes()
        self._read(lease)

    @precondition(lambda self: self.processes[0].known)
    @rule(table=TABLES, which=BYTES, first=st.sampled_from([0, 1]), how=HOW, byte=BYTES)
    def change_while_in_use(self, table: int, which: int, first: int, how: str, byte: int) -> None:
        """A region is used, its file changes, and it is used again, by a request that ends."""
        lease = self.lease(table, which, first, 0)
        if isinstance(lease, Lease):
            self.use(lease, 0, byte)
            self.resize(lease.hold.content, how)
            self.use(lease, 0, byte ^ 1)
            self.end(lease)

    def _read(self, lease: Lease) -> None:
        made = list[bytes]()
        assert refusal(lambda: made.append(lease.real.read())) is (None if lease.is_whole else InvalidRequest)
        assert made == [lease.hold.content.data[lease.at : lease.at + lease.byte_size]] * lease.is_whole

    @rule(lease=consumes(leases))
    def end(self, lease: Lease) -> None:
        self.held.remove(lease)
        del lease.real  # hypothesis may keep the lease itself

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def every_table_lists_what_is_registered(self) -> None:
        for process in self.processes:
            expected = [hold.region for _, hold in sorted(process.known.items())]
            assert list(process.real.status("")) == expected
            for region in expected:
                assert list(process.real.status(region.name)) == [region]

    @invariant()
    def every_file_holds_what_clients_and_leases_wrote(self) -> None:
        for content in self.files:
            if content.path is not None:
                assert content.path.read_bytes() == content.data

    @invariant()
    def only_files_in_use_are_open(self) -> None:
        known = {hold for process in self.processes for hold in process.known.values()}
        needed = known | {lease.hold for lease in self.held}
        inodes = {hold.content.inode for hold in needed}
        assert opened(self.device, {content.inode for content in self.files}) == inodes

    def teardown(self) -> None:
        for lease in self.held:
            del lease.real
        self.held.clear()
        self.processes = [self._process() for _ in range(3)]
        del self.fleet
        try:
            self.only_files_in_use_are_open()
        finally:
            shutil.rmtree(self.directory)


@dataclass
class _Peer:
    tell: Callable[..., None]


def opened(device: int, inodes: set[int]) -> set[int]:
    """Return which of the files this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            status = os.fstat(int(descriptor.name))
        except OSError:  # of the listing itself
            continue
        if status.st_dev == device and status.st_ino in inodes:
            found.add(status.st_ino)
    return found


def test_regions_follow_the_model_in_any_order() -> None:
    run_state_machine_as_test(SharedRegions, settings=machine_settings(0.3, 25))


@pytest.mark.long
def test_regions_follow_the_model_in_many_orders() -> None:
    run_state_machine_as_test(SharedRegions, settings=machine_settings(20.0, 50, in_ci=0.5))
