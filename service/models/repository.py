"""The model repository, ``<model>/<version>/``: found at start, loaded in the background, asked by every request."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from bf16kit.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from bf16kit.runtime import RuntimeInfo
from service.models.policy import Serving, load_serving
from service.models.version import ServedModel
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
# Names become metric labels, health services and log lines.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_LONGEST_VERSION = 18  # digits: what fits 64 bits
_VERSION_NAME = re.compile(rf"[1-9][0-9]{{0,{_LONGEST_VERSION - 1}}}")


class Repository:
    """See :class:`service.contract.Registry`. :meth:`scan`, then :meth:`start`; :meth:`drain`, then :meth:`close`."""

    def __init__(self, root: Path, metrics: Metrics, *, device: str = "auto", threads: int | None = None) -> None:
        self._root = root
        self._metrics = metrics
        self._device = device
        self._threads = threads
        self._models: dict[str, dict[int, ServedModel]] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._stopping = self._retired = False
        self._loader = threading.Thread(target=self._load_all, name="loader", daemon=True)

    # --- life ---------------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Find the models to serve; each appears as ``loading``. Raises ConfigError when the root cannot be listed."""
        try:
            directories = [d for d in sorted(self._root.iterdir()) if d.is_dir() and not d.name.startswith(".")]
        except OSError as error:
            raise ConfigError(f"repository {self._root}: cannot be listed: {error.strerror}") from None
        for directory in directories:
            self._scan_model(directory)
        if not self._models:
            _log.warning(
                "repository %s is empty: serving, but not ready; put artifacts under <model>/<version>/ and restart",
                self._root,
            )

    def start(self) -> None:
        """Load the models one after another on a thread of its own."""
        self._loader.start()

    def retire(self) -> None:
        """From now on not ready, so that load balancers send no more; whoever still comes is answered."""
        self._retired = True
        self._notify()

    def drain(self) -> None:
        """From now on not ready, and every new request is refused."""
        self._stopping = True
        self._notify()

    def close(self, timeout: float | None = None) -> bool:
        """Free every model; False when one was still loading after ``timeout`` seconds."""
        self._stopping = True
        if self._loader.ident is not None:
            self._loader.join(timeout)
        for model in self.models():
            if model.state != "loading":
                model.close()
                self._metrics.remove(model.name, model.version)
        return not self._loader.is_alive()

    # --- the registry -------------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return True

    @property
    def ready(self) -> bool:
        if self._stopping or self._retired:
            return False
        return bool(self._models) and all(model.state == "ready" for model in self._all())

    def get(self, name: str, version: str) -> ServedModel:
        model = self.find(name, version)
        if self._stopping:
            model.rejected("draining", 0.0)
            raise Unavailable("the server is shutting down; try another")
        if model.state == "loading":
            raise Unavailable(f"{model.label} is loading; try again later")
        if model.state != "ready":
            which = f"version {model.version}" if version else "no version"
            raise NotFound(f"{which} of model {name!r} is {'not ' if version else ''}ready; the server's log says why")
        return model

    def find(self, name: str, version: str) -> ServedModel:
        versions = self._models.get(name)
        wanted = _parse_version(version)
        if versions is None:
            raise NotFound(f"unknown model {name!r}")
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

    def models(self) -> list[ServedModel]:
        return list(self._all())

    def versions(self, name: str) -> list[int]:
        return list(self._models.get(name, ()))

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[ServedModel]:
        for versions in self._models.values():
            yield from versions.values()

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()

    def _scan_model(self, directory: Path) -> None:
        name, versions = directory.name, _versions_in(directory)
        if not _MODEL_NAME.fullmatch(name):
            _log.warning("%s is passed over: a model's name has letters, digits and . _ + - only", directory)
            return
        if not versions:
            _log.warning("%s is passed over: it has no version directory (a positive integer)", directory)
            return
        serving, broken = Serving(), ""
        try:
            serving = load_serving(directory)
            versions = serving.version_policy.choose(versions)
        except ConfigError as error:
            broken, versions = str(error), versions[-1:]
        self._models[name] = {version: self._new_model(directory, version, serving) for version in versions}
        for model in self._models[name].values() if broken else ():
            model.fail(broken)

    def _new_model(self, directory: Path, version: int, serving: Serving) -> ServedModel:
        return ServedModel(
            directory.name,
            version,
            directory / str(version),
            serving,
            self._metrics.add(directory.name, version),
            self._notify,
            device=self._device,
            threads=self._threads,
        )

    def _load_all(self) -> None:
        advised: set[str] = set()
        for model in self.models():
            if self._stopping:
                return
            if model.state == "loading":
                model.load()
                _advise(model.info, advised)
        for model in self.models():
            if model.state == "ready" and not self._stopping:
                model.start_shadow()


def _advise(info: RuntimeInfo, advised: set[str]) -> None:
    """Say what to do about a model's note, once: what one model lacks, the next one on this machine lacks too."""
    if info.advice and info.note not in advised:
        advised.add(info.note)
        _log.warning("%s: %s", info.note, info.advice)


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
        raise InvalidRequest(f"model_version {version!r} is not an integer ≥ 0; leave it empty for the newest version")
    return int(version) if len(version) <= _LONGEST_VERSION else 10**_LONGEST_VERSION  # Python limits long numbers


def _preference(model: ServedModel) -> tuple[int, int]:
    """The newest ready version; failing that the newest that is loading; failing that the newest."""
    return {"ready": 2, "loading": 1, "unavailable": 0}[model.state], model.version
