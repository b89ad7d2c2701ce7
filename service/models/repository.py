"""The model repository, ``<model>/<version>/``: what is in it is wanted, and every request asks here for its model."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from bf16kit.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from bf16kit.wording import quoted
from service.models.generation import Generation
from service.models.lease import Lease
from service.models.plan import Plan, Wish
from service.models.policy import Serving, load_serving
from service.models.reconciler import UNLOAD_SECONDS, Reconciler, Slots
from service.models.slot import Slot
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
# Names become metric labels, health services and log lines.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_LONGEST_VERSION = 18  # digits: what fits 64 bits
_PREFERENCE = {"ready": 2, "loading": 1, "unavailable": 0}
_VERSION_NAME = re.compile(rf"[1-9][0-9]{{0,{_LONGEST_VERSION - 1}}}")


class Repository:
    """See :class:`service.contract.Registry`. :meth:`scan`, then :meth:`start`; :meth:`drain`, then :meth:`close`."""

    def __init__(
        self,
        root: Path,
        metrics: Metrics,
        *,
        device: str = "auto",
        threads: int | None = None,
        unload_seconds: float = UNLOAD_SECONDS,
    ) -> None:
        self._root = root
        self._callbacks: list[Callable[[], None]] = []
        self._stopping = self._retired = False
        self._reconciler = Reconciler(
            metrics, self._notify, device=device, threads=threads, unload_seconds=unload_seconds
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Want what the directory holds: new models appear as ``loading``, those that are gone are unloaded.

        Raises ConfigError when the root cannot be listed.
        """
        try:
            directories = [d for d in sorted(self._root.iterdir()) if d.is_dir() and not d.name.startswith(".")]
        except OSError as error:
            raise ConfigError(f"repository {self._root}: cannot be listed: {error.strerror}") from None
        wishes = [wish for directory in directories if (wish := _wish(directory)) is not None]
        if not wishes:
            _log.warning(
                "repository %s is empty: serving, but not ready; put artifacts under <model>/<version>/ and restart",
                self._root,
            )
        self._reconciler.desire(wishes)

    def start(self) -> None:
        """Load the models one after another, by name and version, on a thread of their own."""
        self._reconciler.start()

    def load(self, name: str) -> Future[None]:
        """Serve what the directory of model ``name`` holds now; what is unchanged is left alone.

        The future ends when it is served, or fails with Unavailable. Raises NotFound where there is no such model.
        """
        wish = _wish(self._root / name) if _MODEL_NAME.fullmatch(name) else None
        if wish is None:
            raise NotFound(f"the repository has no model {quoted(name)}")
        return self._reconciler.want(wish)

    def unload(self, name: str) -> Future[None]:
        """Serve model ``name`` no more; the future ends when its last request is answered and its memory free.

        Raises NotFound for a model that is not served.
        """
        if name not in self._slots:
            raise NotFound(f"unknown model {quoted(name)}")
        return self._reconciler.want(Wish(name))

    def retire(self) -> None:
        """From now on not ready, so that load balancers send no more; whoever still comes is answered."""
        self._retired = True
        self._notify()

    def drain(self) -> None:
        """From now on not ready, and every new request is refused."""
        self._stopping = True
        self._notify()

    def close(self, timeout: float | None = None) -> bool:
        """Free every model, all at once; False when something was still at work after ``timeout`` seconds."""
        self._stopping = True
        return self._reconciler.close(math.inf if timeout is None else time.monotonic() + timeout)

    # --- the registry -------------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return True

    @property
    def ready(self) -> bool:
        if self._stopping or self._retired:
            return False
        slots = self.models()
        return bool(slots) and all(slot.state == "ready" for slot in slots)

    def acquire(self, name: str, version: str) -> Lease[Generation]:
        while True:
            try:
                model = self.get(name, version)
            except Unavailable as error:
                if error.reason:
                    self.find(name, version).series.rejected(error.reason)
                raise
            if model.leases.take():
                return Lease(model.leases, model)
            # It was unpublished between the two: what has taken its place is found now.

    def get(self, name: str, version: str) -> Generation:
        slot = self.find(name, version)
        if self._stopping:
            raise Unavailable("the server is shutting down; try another", "draining")
        model = slot.model
        if model is not None:
            return model
        if slot.state == "loading":
            raise Unavailable(f"{slot.label} is loading; try again later")
        which = f"version {slot.version}" if version else "no version"
        raise NotFound(f"{which} of model {name!r} is {'not ' if version else ''}ready; the server's log says why")

    def find(self, name: str, version: str) -> Slot:
        versions = self._slots.get(name)
        wanted = _parse_version(version)
        if versions is None:
            raise NotFound(f"unknown model {quoted(name)}")
        if wanted is None:
            return max(versions.values(), key=_preference)
        if wanted not in versions:
            raise NotFound(f"model {name!r} has no version {wanted}; it has {', '.join(map(str, versions))}")
        return versions[wanted]

    def is_ready(self, name: str, version: str) -> bool:
        try:
            return self.find(name, version).state == "ready" and not (self._stopping or self._retired)
        except NotFound:
            return False

    def models(self) -> list[Slot]:
        return [slot for versions in self._slots.values() for slot in versions.values()]

    def versions(self, name: str) -> list[int]:
        return [version for version, slot in self._slots.get(name, {}).items() if slot.state == "ready"]

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> Slots:
        return self._reconciler.slots

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()


def _wish(directory: Path) -> Wish | None:
    """What a model's directory asks for; None where it is no model's, which the log says."""
    name, versions = directory.name, _versions_in(directory)
    if not _MODEL_NAME.fullmatch(name):
        _log.warning("%s is passed over: a model's name has letters, digits and . _ + - only", directory)
        return None
    if not versions:
        _log.warning("%s is passed over: it has no version directory (a positive integer)", directory)
        return None
    serving, broken = Serving(), ""
    try:
        serving = load_serving(directory)
        versions = serving.version_policy.choose(versions)
    except ConfigError as error:
        broken, versions = str(error), versions[-1:]
    paths = [(version, directory / str(version)) for version in versions]
    return Wish(name, tuple(Plan(version, path, serving, _stamp(path), broken) for version, path in paths))


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes when the artifact is replaced: an artifact is published by one rename, its manifest with it."""
    try:
        seen = (path / "manifest.json").stat()
    except OSError:
        return ()
    return seen.st_ino, seen.st_size, seen.st_mtime_ns


def _versions_in(directory: Path) -> list[int]:
    try:
        return sorted(int(d.name) for d in directory.iterdir() if _VERSION_NAME.fullmatch(d.name) and d.is_dir())
    except OSError as error:
        _log.warning("%s cannot be listed: %s", directory, error.strerror)
        return []


def _parse_version(version: str) -> int | None:
    if version == "":
        return None
    if not (version.isascii() and version.isdecimal()):
        raise InvalidRequest(
            f"model_version {quoted(version)} is not an integer ≥ 0; leave it empty for the newest version"
        )
    return int(version) if len(version) <= _LONGEST_VERSION else 10**_LONGEST_VERSION  # Python limits long numbers


def _preference(slot: Slot) -> tuple[int, int]:
    """The newest ready version; failing that the newest that is loading; failing that the newest."""
    return _PREFERENCE[slot.state], slot.version
