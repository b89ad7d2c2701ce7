"""Artifacts are truncated, changed, replaced and deleted while they are served: no response is ever wrong.

One client sends requests without pause, and compares each output with the correct one bit for bit.
"""

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import figures
import numpy as np
import pytest
import scanning
from artifacts import write_product
from asking import RequestLoop, code_of
from attacked import Target
from serverprocess import ServerProcess
from waiting import until

from bf16kit.artifact.publish import exchange
from bf16kit.runtime.loading import load

pytestmark = pytest.mark.hostile
WIDTH = 512  # 512 KiB of weights: enough pages
FEEDS = {"x": np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)}
# The shadow gets every request, which loads the reference. No batches, so that there is exactly one correct output.
SERVING = "max_batch_size: 0\nshadow: {rate: 1, max_per_second: 1000}\n"


class Workshop:
    """Artifacts outside the repository, and their correct outputs by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.right: dict[str, bytes] = {}
        for seed, name in enumerate(("first", "second", "third")):
            artifact = write_product(root / name / "1", width=WIDTH, seed=seed)
            self.right[name] = load(artifact, "cpu", threads=1).run(FEEDS)["y"].tobytes()
        self._copies = 0

    def copy(self, name: str) -> Path:
        """Return a new copy of one of the artifacts, on the repository's file system."""
        self._copies += 1
        return Path(shutil.copytree(self.root / name / "1", self.root / "copies" / str(self._copies)))

    def publish(self, name: str, model: Path) -> None:
        """Copy the artifact to version 1 of ``model``, a directory in a repository."""
        shutil.copytree(self.root / name / "1", model / "1")
        (model / "serving.yaml").write_text(SERVING)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("artifacts"))


@contextlib.contextmanager
def serving(repository: Path, program: Path | None = None) -> Iterator[Target]:
    with ServerProcess("--repository", repository, program=program) as process:
        yield Target(process.wait_ready())


def warm(target: Target, *models: str) -> None:
    """Have the server create its threads and heaps and import its modules, so that these do not count as growth."""
    for _ in range(50):
        assert {code_of(target.address, model, FEEDS) for model in models} == {"OK"}


@contextlib.contextmanager
def asked(
    target: Target, model: str, right: Mapping[str, bytes], allowed: tuple[str, ...] = ()
) -> Iterator[RequestLoop]:
    """Yield a client that sends requests throughout the block, and check the server afterwards.

    Fails unless every output is correct, every code is OK or one of ``allowed``, the server stays well, its live drift
    is within budget, and its log shows no bug.
    """
    with target.stays_healthy(), RequestLoop(target.address, model, FEEDS, right) as asking:
        asking.wait_for(1)
        yield asking
        asking.wait_for(20)
    figures.record(**asking.codes, wrong_answers=len(asking.wrong), slowest_ms=round(asking.slowest * 1e3))
    assert asking.wrong == []
    assert set(asking.codes) <= {"OK", *allowed}
    assert asking.slowest < 1
    assert "Traceback" not in target.process.log, target.process.log.partition("Traceback")[2][:3000]
    metrics = target.process.get("/metrics")[1].splitlines()
    ratios = [float(line.rsplit(" ", 1)[1]) for line in metrics if line.startswith("bf16kit_drift_budget_ratio{")]
    assert all(ratio <= 1 for ratio in ratios)


# --- a server that does not reload changed models ---------------------------------------------------------------------


def cut_short(version: Path, workshop: Workshop, asking: RequestLoop) -> None:
    for size in (1 << 18, 4096, 1, 0):
        for file in version.iterdir():
            os.truncate(file, min(size, file.stat().st_size))
        asking.wait_for(20)


def flip_bits(version: Path, workshop: Workshop, asking: RequestLoop) -> None:
    choice = random.Random(8)
    for _ in range(figures.amount(300, 10_000)):
        flip_bit(choice.choice(sorted(version.iterdir())), choice)
        asking.wait_for(1)


def flip_bit(file: Path, choice: random.Random) -> None:
    """Flip one of a byte's upper four bits: in weights, often a bit of an exponent."""
    with file.open("r+b") as opened:
        opened.seek(at := choice.randrange(file.stat().st_size))
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes((byte ^ 1 << choice.randrange(4, 8),)))


def overwrite(version: Path, workshop: Workshop, asking: RequestLoop) -> None:
    """Overwrite as ``cp -r second/* version/`` does: each file is emptied, then written."""
    for file in (workshop.root / "second" / "1").iterdir():
        shutil.copyfile(file, version / file.name)


def exchange_directories(version: Path, workshop: Workshop, asking: RequestLoop) -> None:
    replace(version, workshop, "second")


def delete(version: Path, workshop: Workshop, asking: RequestLoop) -> None:
    shutil.rmtree(version.parent)


ATTACKS = (cut_short, flip_bits, overwrite, exchange_directories, delete)


@pytest.fixture(scope="module")
def settled(workshop: Workshop) -> Iterator[Target]:
    """Yield a server with a model for each attack, with the references loaded."""
    for attack in ATTACKS:
        workshop.publish("first", workshop.root / "settled" / attack.__name__)
    with serving(workshop.root / "settled") as target:
        warm(target, *(attack.__name__ for attack in ATTACKS))
        until(lambda: target.process.log.count("live drift on") == len(ATTACKS), what="the references")
        yield target


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_loaded_model_gives_the_same_outputs_when_its_files_are_attacked(
    workshop: Workshop, settled: Target, attack: Callable[[Path, Workshop, RequestLoop], None]
) -> None:
    model = attack.__name__
    with asked(settled, model, {"first": workshop.right["first"]}) as asking:
        attack(workshop.root / "settled" / model / "1", workshop, asking)
    figures.record(how_much=f"{sum(asking.codes.values()):,} requests")


# --- a server that reloads changed models -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scanned(workshop: Workshop) -> Iterator[Target]:
    """Yield a server of the model ``product`` that scans its repository ten times a second."""
    workshop.publish("first", workshop.root / "scanned" / "product")
    with serving(workshop.root / "scanned", Path(scanning.__file__)) as target:
        for count, name in enumerate(("second", "third", "first"), start=2):
            warm(target, "product")
            replace(workshop.root / "scanned" / "product" / "1", workshop, name)
            until(lambda count=count: target.process.log.count("is ready") == count, what=name)  # type: ignore[misc]
        yield target


def new_version(version: Path, workshop: Workshop, choice: random.Random) -> None:
    """Add a newer version, or remove it if it is there."""
    newer = version.with_name("2")
    if newer.exists():
        newer.rename(workshop.copy("third") / "old")
    else:
        workshop.copy(choice.choice(("second", "third"))).rename(newer)


def replace(version: Path, workshop: Workshop, name: str) -> None:
    shutil.rmtree(exchange(workshop.copy(name), version, workshop.root / "aside"))


def replace_by_any(version: Path, workshop: Workshop, choice: random.Random) -> None:
    replace(version, workshop, choice.choice(("first", "second", "third")))


def half_written(version: Path, workshop: Workshop, choice: random.Random) -> None:
    """Copy some files of another artifact, in any order."""
    for file in choice.sample(sorted((workshop.root / "second" / "1").iterdir()), 3):
        shutil.copyfile(file, version / file.name)


def damage(version: Path, workshop: Workshop, choice: random.Random) -> None:
    """Delete, truncate, empty or flip a file, and touch the manifest so that the server loads everything again."""
    (version / "manifest.json").touch()
    file = choice.choice(sorted(version.iterdir()))
    kind = choice.randrange(4)
    if kind == 0:
        file.unlink()
    elif kind == 1:
        os.truncate(file, choice.choice((0, file.stat().st_size // 2)))
    elif file.stat().st_size:
        flip_bit(file, choice)


def age(version: Path, workshop: Workshop, choice: random.Random) -> None:
    """Flip low bits of some weights: too small a change for the golden samples to detect, yet outputs change."""
    (version / "manifest.json").touch()
    with contextlib.suppress(FileNotFoundError), (version / "weights.bf16").open("r+b") as opened:
        for _ in range(20):
            opened.seek(at := 2 * choice.randrange(WIDTH * WIDTH))  # the low byte of a number
            byte = opened.read(1) or b"\0"
            opened.seek(at)
            opened.write(bytes((byte[0] ^ 1,)))


CHANGES = (new_version, replace_by_any, replace_by_any, half_written, damage, age)


def test_a_model_that_is_reloaded_repeatedly_is_never_wrong(workshop: Workshop, scanned: Target) -> None:
    choice, changes = random.Random(8), 0
    version = workshop.root / "scanned" / "product" / "1"
    with asked(scanned, "product", workshop.right) as asking:
        end = time.monotonic() + figures.amount(5, 120)
        while time.monotonic() < end:
            choice.choice(CHANGES)(version, workshop, choice)
            changes += 1
            time.sleep(choice.choice((0, 0.01, 0.1, 0.3)))  # so that changes meet scans and loads at different moments
        shutil.rmtree(version.with_name("2"), ignore_errors=True)
        settle(workshop, version, asking)
    figures.record(how_much=f"{changes} changes", answers_by_artifact=dict(asking.answered))
    assert {"first", "second"} <= asking.answered.keys()


def settle(workshop: Workshop, version: Path, asking: RequestLoop) -> None:
    """Publish an artifact last, and check that in the end only it serves."""
    replace(version, workshop, "second")

    def only_it() -> bool:
        seen = dict(asking.answered)
        asking.wait_for(20)
        return {name for name in asking.answered if asking.answered[name] > seen.get(name, 0)} == {"second"}

    until(only_it, what="answers of the artifact that was published last, and no others")
