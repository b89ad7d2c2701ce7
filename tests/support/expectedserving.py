"""What must be served after each change of a repository: the documented rules in plain Python, one model at a time.

:class:`Expected` is told what is on disk and what is wanted, and who holds a lease. It knows nothing of threads: what
waits for something is a generator that is asked again later.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from scriptedengines import Kind

RETRY_S, STAY_S = 60.0, 10.0


class Setting(NamedTuple):
    """``serving.yaml``. ``policy`` is all of YAML's flow style; ``broken``: the file is not valid."""

    policy: str = "{latest: 1}"
    fallback: str = "alert"
    queue: int = 128
    broken: bool = False

    @property
    def text(self) -> str:
        fallback = f"{{policy: {self.fallback}, min_stay_seconds: {STAY_S}}}"
        key = "nonsense" if self.broken else "max_queue_size"
        return f"version_policy: {self.policy}\nfallback: {fallback}\n{key}: {self.queue}\n"

    @property
    def tries_older(self) -> bool:
        return "latest" in self.policy and "strict" not in self.policy

    def choose(self, versions: list[int]) -> list[int]:
        if self.broken:
            return versions[-1:]
        return versions[-1 if "1" in self.policy else -2 :] if "latest" in self.policy else versions


class Files(NamedTuple):
    """The files of one version on disk."""

    edition: int
    kind: Kind


@dataclass(frozen=True)
class Wish:
    """The versions to serve, with the edition that each had on disk. Without any, the model is to be unloaded."""

    versions: tuple[tuple[int, int], ...] = ()
    setting: Setting = field(default_factory=Setting)
    failed: frozenset[int] = frozenset()
    loads_older: bool = field(default=True, compare=False)

    @property
    def reported(self) -> set[int]:
        return {version for version, _ in self.versions} | self.failed


@dataclass(eq=False)
class Loaded:
    """A generation: what it was loaded from and by, who holds it, and which precision answers.

    ``load`` is its number among the loads of its model.
    """

    edition: int
    plan: tuple[int, Setting]
    load: int
    leases: int = 0
    phase: Literal["bf16", "warming", "fp32"] = "bf16"
    closing: bool = False
    reference_may_come: bool = False  # it was being loaded when the model was replaced
    falls: int = 0
    over_at: float = 0.0
    retry_at: float = 0.0

    def over(self, now: float) -> bool:
        """A verdict over the budget. Return whether the reference is to be loaded."""
        if self.phase == "fp32":
            self.over_at = now
        if self.phase != "bf16" or self.plan[1].fallback != "fp32" or now < self.retry_at:
            return False
        self.phase = "warming"
        return True

    def within(self, now: float) -> None:
        """A verdict clearly within the budget."""
        if self.phase == "fp32" and now - self.over_at >= STAY_S * 2 ** (self.falls - 1):
            self.phase = "bf16"

    def warmed(self, now: float, *, failed: bool) -> None:
        """The end of loading the reference."""
        if failed:
            self.phase, self.retry_at = "bf16", now + RETRY_S
        else:
            self.phase, self.over_at, self.falls = "fp32", now, self.falls + 1


class Expected:
    """One model of the repository."""

    def __init__(self, disk: dict[int, Files], setting: Setting = Setting()) -> None:  # noqa: B008 -- frozen
        self.disk = disk
        self.setting = setting
        self.wanted: Wish | None = None  # the newest
        self.serving: dict[int, Loaded] = {}
        self.closing: list[Loaded] = []  # they answer no new request, and wait for their last lease, or for each other
        self.applied = self.unfinished = 0  # wishes that were passed on, and those of them that have not ended
        self.loads = 0  # that have come to the engine
        self.loading = False  # a load waits there
        self.given_up = 0  # loads that wait there although nobody wants them any more
        self._known: dict[int, int] = {}  # the edition of each version that was last to be served
        self._pending: tuple[Wish, int] | None = None  # and how many wait for it
        self._change: Iterator[None] | None = None
        self._outcome: Wish | None = None  # what is to be served instead

    @property
    def settled(self) -> bool:
        return self._change is None and self._pending is None

    def wish(self, *, loads_older: bool = True) -> Wish:
        """Return what the disk asks for now."""
        chosen = self.setting.choose(sorted(self.disk))
        setting = Setting(broken=True) if self.setting.broken else self.setting
        return Wish(tuple((v, self.disk[v].edition) for v in chosen), setting, loads_older=loads_older)

    def apply(self, wish: Wish) -> None:
        """Pass a wish on. The newest one counts; one that waits for another is replaced."""
        self.wanted = wish
        self._pass_on(wish)

    def _pass_on(self, wish: Wish) -> None:
        self.applied += 1
        self.unfinished += 1
        self._known |= dict(wish.versions)
        waiting = 0
        if self._pending is not None:
            earlier, waiting = self._pending
            if bool(earlier.versions) != bool(wish.versions):  # the opposite is wanted now: it fails at once
                self.unfinished -= waiting
                waiting = 0
        self._pending = wish, waiting + 1

    def advance(self, *, held: bool) -> None:
        """Make all progress that is possible. ``held``: loads wait in the engine."""
        self._held = held
        while True:
            if self._change is None:
                if self._pending is None:
                    return
                wish, self._waiting = self._pending
                self._pending, self._change = None, self._changed(wish)
            if next(self._change, "ended") is None:
                return
            self._change = None
            self.unfinished -= self._waiting
            if self._outcome is not None and self._pending is None:
                self._pass_on(self._outcome)

    # --- the steps of one change --------------------------------------------------------------------------------------

    def _changed(self, wish: Wish) -> Iterator[None]:
        """Load all versions of the wish, then unload the others; if one cannot be loaded, all others stay."""
        self._outcome, complete, failing = None, True, []
        for version, stamp in wish.versions:
            now, plan = self.serving.get(version), (stamp, wish.setting)
            if now is not None and now.plan == plan:
                continue
            files = self.disk.get(version)
            good = files is not None and files.kind == "good" and not wish.setting.broken
            if files is not None and files.kind != "damaged" and not wish.setting.broken:
                self.loads += 1
                self.loading = True
                while self._held:
                    if self._unwanted(version, plan):
                        self.given_up += 1
                        good = False
                        break
                    yield
                self.loading = False
            if good and files is not None:
                self.serving[version] = Loaded(files.edition, plan, self.loads)
                yield from self._close([] if now is None else [now])
            else:
                complete = False
                if now is None:
                    failing.append(version)
        if complete:
            yield from self._unload_others(wish)
        elif failing and not wish.setting.broken:
            self._outcome = self._instead(wish, failing)

    def _unwanted(self, version: int, plan: tuple[int, Setting]) -> bool:
        if self._pending is None:
            return False
        newer = self._pending[0]
        return (version, plan[0]) not in newer.versions or newer.setting != plan[1]

    def _instead(self, wish: Wish, failing: list[int]) -> Wish | None:
        """As many versions as have failed: first those that serve, then older ones, the newest first."""
        setting = wish.setting
        chosen = [(v, self._known[v]) for v in sorted(self.serving, reverse=True) if v not in wish.reported]
        if setting.tries_older and wish.loads_older:
            tried = wish.reported | {version for version, _ in chosen}
            older = [v for v in sorted(self.disk, reverse=True) if v < wish.versions[0][0] and v not in tried]
            chosen += [(v, self.disk[v].edition) for v in older]
        kept = [each for each in wish.versions if each[0] not in failing]
        if not chosen and not (kept and setting.tries_older):
            return None
        versions = tuple(sorted([*kept, *chosen[: len(failing)]]))
        return Wish(versions, setting, wish.failed | set(failing), wish.loads_older)

    def _unload_others(self, wish: Wish) -> Iterator[None]:
        kept = {version for version, _ in wish.versions}
        if self._pending is not None:
            kept |= self._pending[0].reported - wish.failed
        gone = [self.serving.pop(version) for version in sorted(self.serving) if version not in kept]
        yield from self._close(gone)

    def _close(self, gone: list[Loaded]) -> Iterator[None]:
        self.closing += gone
        for each in gone:
            each.closing = True
            each.reference_may_come = each.phase == "warming"
        while any(each.leases for each in gone):
            yield
        for each in gone:
            self.closing.remove(each)
