"""Which models are wanted, by ``model_control`` and the repository's content. These tests load no models."""

import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import pytest
from artifacts import write_mlp
from othersfiles import unreadable, world_readable_directory

from bf16kit.messages.errors import ConfigError
from bf16kit.service.models.controller import Controller, Mode
from bf16kit.service.models.plan import DesiredModel
from bf16kit.service.operations import IndexEntry


class Told:
    """A stand-in for the reconciler: it holds the newest desired models by name, and counts the calls."""

    def __init__(self) -> None:
        self.wanted: dict[str, DesiredModel] = {}
        self.times = 0

    def apply(self, desired: DesiredModel) -> Future[None]:
        self.times += 1
        self.wanted[desired.name] = desired
        if not desired.plans:
            del self.wanted[desired.name]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def apply_all(self, desired_models: Iterable[DesiredModel]) -> dict[str, Future[None]]:
        self.wanted = {desired.name: desired for desired in desired_models}
        self.times += 1
        return {name: Future() for name in self.wanted}

    @property
    def versions(self) -> dict[str, list[int]]:
        return {name: sorted(desired.versions) for name, desired in self.wanted.items()}


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def now() -> list[float]:
    """Return the clock of the controllers."""
    return [0.0]


@pytest.fixture
def control(tmp_path: Path, told: Told, now: list[float]) -> Callable[..., Controller]:
    def make(mode: Mode, *start_up: str) -> Controller:
        return Controller(tmp_path, told.apply, told.apply_all, mode, start_up, clock=lambda: now[0])

    return make


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("artifact") / "m" / "1"
    write_mlp(target)
    return target


@pytest.fixture
def put(tmp_path: Path, artifact: Path) -> Callable[..., Path]:
    def copy(name: str, version: int = 1, serving: str = "") -> Path:
        target = tmp_path / name / str(version)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(artifact, target, copy_function=shutil.copyfile)  # without the originals' times
        if serving:
            (tmp_path / name / "serving.yaml").write_text(serving)
        return target

    return copy


def still() -> None:
    """Change nothing between the two looks of a poll."""


Put = Callable[..., Path]
Control = Callable[..., Controller]


# --- at the start -----------------------------------------------------------------------------------------------------


def test_a_server_starts_with_all_models_or_with_those_named(control: Control, told: Told, put: Put) -> None:
    for name in ("a", "b", "c"):
        put(name)
    for mode, named, wanted in (
        ("none", (), ["a", "b", "c"]),
        ("poll", (), ["a", "b", "c"]),
        ("explicit", (), []),
        ("explicit", ("c", "a"), ["a", "c"]),
        ("explicit", ("*",), ["a", "b", "c"]),
    ):
        control(mode, *named).apply_initial()
        assert sorted(told.wanted) == wanted


def test_a_missing_model_in_load_model_is_a_configuration_error(control: Control, put: Put) -> None:
    put("a")
    with pytest.raises(ConfigError, match="load_model: the repository has no model 'b'; its models are a"):
        control("explicit", "a", "b").apply_initial()


def test_an_unreadable_version_of_another_user_is_not_mistaken_for_a_copy_in_progress(
    told: Told, artifact: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world_readable_directory() as place:
        version = shutil.copytree(artifact, place / "mlp" / "1")
        with unreadable(version) as user:
            Controller(place, told.apply, told.apply_all, "poll", ()).poll(lambda: None)
        assert caplog.messages == [f"{place / 'mlp'} is skipped: user {user} may not read {version}"]


def test_a_repository_without_models_is_logged_with_the_remedy(
    control: Control, tmp_path: Path, artifact: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New users mount a model or a version instead of the repository, or a model without version directories."""
    control("explicit").apply_initial()
    assert caplog.messages == [], "clients will load models"
    control("poll").apply_initial()
    assert "is empty: serving, but not ready" in caplog.messages[-1]
    assert "restart" not in caplog.messages[-1]
    shutil.copytree(artifact, tmp_path / "mlp")
    control("none").apply_initial()
    assert "it is an artifact, and not at <model>/<version>/" in caplog.messages[-2]
    assert "holds no model: serving, but not ready" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("under <model>/<version>/ and restart")
    shutil.copytree(tmp_path / "mlp", tmp_path, dirs_exist_ok=True)
    control("none").apply_initial()
    assert "is an artifact itself, with its manifest.json: serving" in caplog.messages[-1]


# --- poll -------------------------------------------------------------------------------------------------------------


def test_a_poll_updates_the_wishes_only_if_models_are_added_changed_or_removed(
    tmp_path: Path, control: Control, told: Told, put: Put
) -> None:
    put("a")
    poll = control("poll")
    poll.apply_initial()
    for _ in range(2):
        poll.poll(still)
    assert told.times == 1
    put("b", 3)
    poll.poll(still)
    assert told.versions == {"a": [1], "b": [3]}
    before = told.wanted["b"]
    put("b", 4, "version_policy: all")
    poll.poll(still)
    assert told.versions == {"a": [1], "b": [3, 4]}
    put("b", 3)
    poll.poll(still)
    assert told.wanted["b"].plans[0].stamp != before.plans[0].stamp
    shutil.rmtree(tmp_path / "a")
    poll.poll(still)
    assert told.versions == {"b": [3, 4]}
    (tmp_path / "b" / "serving.yaml").write_text("max_batch: 1")
    poll.poll(still)
    assert [bool(plan.broken) for plan in told.wanted["b"].plans] == [True]


def test_a_copy_in_progress_is_ignored_until_it_has_a_manifest_and_stops_changing(
    control: Control, told: Told, put: Put
) -> None:
    before = put("m")
    poll = control("poll")
    poll.apply_initial()
    for file in ("manifest.json", "weights.bf16", "cpu.onnx"):  # the files of a version that serves are replaced
        (before / file).unlink()
        poll.poll(still)
    put("m")
    poll.poll(still)
    assert (told.versions, told.times) == ({"m": [1]}, 2)
    target = put("m", 2)
    manifest, weights = (target / "manifest.json").read_bytes(), (target / "weights.bf16").read_bytes()
    (target / "manifest.json").unlink()
    poll.poll(still)
    assert told.times == 2
    (target / "weights.bf16").write_bytes(b"")
    (target / "manifest.json").write_bytes(manifest)

    def more() -> None:
        with (target / "weights.bf16").open("ab") as file:
            file.write(b"more")

    for _ in range(2):
        poll.poll(more)
    assert told.times == 2
    for _ in range(3):
        poll.poll(still)  # the copy has stalled, so it is tried, once
    assert (told.versions, told.times) == ({"m": [2]}, 3)
    (target / "weights.bf16").write_bytes(weights)
    poll.poll(still)
    assert told.times == 4


@pytest.mark.parametrize("broken", ["", "m"])
def test_wishes_stay_while_a_directory_cannot_be_listed_and_each_reason_is_logged_once(
    tmp_path: Path,
    control: Control,
    told: Told,
    put: Put,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    put("m")
    for skipped in ("spaced name", "coming"):
        (tmp_path / skipped / "1").mkdir(parents=True)
    poll = control("poll")
    poll.apply_initial()
    before, lists = told.wanted, Path.iterdir

    def fails(path: Path) -> Iterable[Path]:
        if path == tmp_path / broken:
            raise PermissionError(13, "Permission denied")
        return lists(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", fails)
        for _ in range(3):
            poll.poll(still)
    assert (told.wanted, told.times) == (before, 1)
    reasons = [each.partition("is skipped: ")[2][:7] or "denied" for each in caplog.messages]
    assert reasons == ["none of", "a model", "denied"]
    poll.poll(still)
    assert told.times == 1


# --- load and unload --------------------------------------------------------------------------------------------------


def test_a_manifest_that_is_a_pipe_does_not_block_a_load_with_inputs(control: Control, told: Told, put: Put) -> None:
    """Opening a pipe blocks until another process writes to it, which would block all loads."""
    target = put("m")
    (target / "manifest.json").unlink()
    os.mkfifo(target / "manifest.json")
    explicit = control("explicit")
    explicit.apply_initial()
    explicit.load("m", '{"input": [{"name": "x"}]}')
    assert told.wanted["m"].versions == {1}


# --- the index --------------------------------------------------------------------------------------------------------


def test_the_index_lists_served_unloaded_and_never_loaded_models(
    tmp_path: Path, control: Control, put: Put, now: list[float]
) -> None:
    """What others change on the disk is seen a second later: the repository is listed once a second."""
    for name, version in (("b", 2), ("b", 10), ("a", 1), ("c", 1)):
        put(name, version)
    (tmp_path / "b" / "serving.yaml").write_text("version_policy: all")
    explicit = control("explicit")
    explicit.apply_initial()
    never = [IndexEntry("a"), IndexEntry("b"), IndexEntry("c")]
    assert explicit.index([]) == never
    explicit.load("b")
    ready = [IndexEntry("b", "10", "READY"), IndexEntry("b", "2", "READY")]
    assert explicit.index(ready) == [never[0], ready[1], ready[0], never[2]]
    explicit.unload("b")
    unloaded = [IndexEntry("b", version, "UNAVAILABLE", "unloaded") for version in ("2", "10")]
    assert explicit.index([]) == [never[0], *unloaded, never[2]]
    shutil.rmtree(tmp_path / "b" / "2")
    now[0] += 0.9
    assert explicit.index([]) == [never[0], *unloaded, never[2]]
    now[0] += 0.1
    assert explicit.index([]) == [never[0], unloaded[1], never[2]]
    shutil.rmtree(tmp_path / "b")
    explicit.load("a")
    assert [line.name for line in explicit.index([])] == ["a", "c"], "at once after a change of this server's own"
    now[0] += 1
    shutil.rmtree(tmp_path)
    assert explicit.index(ready) == [ready[1], ready[0]], "what serves, if the repository cannot be listed"
