"""The models that Ray runs: their handles, and what their replicas report. Nothing of it outlasts the front."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from bf16kit.deploy.ray.rpcs import FRONT
from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.messages.wording import quoted
from bf16kit.service.models.repository import parse_version
from bf16kit.service.operations import IndexEntry, VersionStatistics
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

_log = logging.getLogger(__name__)
#: Ray's errors when the cluster does not do what it is asked.
RAY_ERRORS = (RayError, RayServeException, TimeoutError, ConnectionError)
_STATES = ("READY", "LOADING", "UNAVAILABLE")  # the best first: a version has the state of its best replica
_REPORTS_PER_SECOND = 100  # of all replicas together, to one front: many replicas are asked less often
_SLACK_SECONDS = 0.2  # by which Ray's calls each second may be early
_REPORT_SECONDS = 0.9  # for the reports of all replicas of a model; without them, their last ones count


class State(NamedTuple):
    """Ray's state of an application: RUNNING, DEPLOYING, UNHEALTHY and so on, and what Ray says about it."""

    status: str
    message: str

    @classmethod
    def of(cls, application: Any) -> Self:
        """``message`` is on one line: of a traceback the first and the last."""
        said = "\n".join(each.message for each in application.deployments.values()).strip().splitlines()
        return cls(str(application.status.value), " … ".join(dict.fromkeys([*said[:1], *said[-1:]])))


class Report(NamedTuple):
    """What a replica reports: its versions and their counts. ``target`` is the address at which it is scraped."""

    target: str
    versions: Sequence[IndexEntry]
    statistics: Sequence[VersionStatistics]


class RunningModel:
    """One model: its application's handle, Ray's state of it, and the newest reports of its replicas."""

    def __init__(self, name: str, handle: Any = None) -> None:
        """``handle``: None, it is asked of Ray."""
        self.name = name
        self.reports: Sequence[Report] = ()
        self.versions: Sequence[IndexEntry] = ()
        self._handle = handle

    async def update(self, application: Any) -> None:
        """Take Ray's state of the application, and ask its replicas for their reports."""
        if self._handle is None:
            with contextlib.suppress(*RAY_ERRORS):  # it was removed just now
                self._handle = await asyncio.to_thread(serve.get_app_handle, f"{FRONT}.{self.name}")
        runs = any(each.replica_states.get("RUNNING") for each in application.deployments.values())
        if self._handle is not None and runs:
            await self.ask()
        else:
            self.reports = ()
        self.versions = self._versions(State.of(application))

    async def ask(self) -> None:
        """Ask all replicas for a report. If one is late, all keep their last reports, and the log says so."""
        try:
            self.reports = await self._handle.broadcast("report").results_async(timeout_s=_REPORT_SECONDS)
        except RAY_ERRORS as error:
            _log.warning("replicas of %r count with their last reports: %s", self.name, type(error).__name__)

    def _versions(self, state: State) -> Sequence[IndexEntry]:
        """Return the versions that replicas report, ascending. While Ray deploys others, an entry has its reason."""
        best: dict[str, IndexEntry] = {}
        for each in (version for report in self.reports for version in report.versions):
            known = best.get(each.version)
            if known is None or _STATES.index(each.state) < _STATES.index(known.state):
                best[each.version] = each
        found = sorted(best.values(), key=lambda each: int(each.version))
        if state.status != "RUNNING":
            known_as = "LOADING" if state.status == "DEPLOYING" else "UNAVAILABLE"
            found.append(IndexEntry(self.name, "", known_as, f"Ray: {state.status}: {state.message}"))
        return found

    def is_ready(self, version: int | None) -> bool:
        """Return whether a replica has this version ready; None: any version."""
        return any(each.state == "READY" and version in (None, int(each.version)) for each in self.versions)

    @property
    def handle(self) -> Any:
        """The handle of a model that has a replica. Raises Unavailable otherwise.

        Which versions the replicas have is theirs to say: there may be newer ones than the last reports named.
        """
        if not self.reports:
            raise Unavailable(f"no replica of model {self.name!r} is ready; try again later")
        return self._handle

    def statistics(self) -> list[VersionStatistics]:
        """Return the sums of all replicas for each version."""
        total: dict[int, VersionStatistics] = {}
        for each in (counted for report in self.reports for counted in report.statistics):
            known = total.get(each.version)
            snapshot = each.snapshot if known is None else known.snapshot + each.snapshot
            total[each.version] = VersionStatistics(each.name, each.version, each.device, snapshot)
        return [total[version] for version in sorted(total)]


class RunningModels:
    """All models, by the applications that Ray runs: what the front needs of a registry. For one event loop."""

    live = True

    def __init__(self) -> None:
        self.by_name: dict[str, RunningModel] = {}
        self.retired = False  # if it is, nothing is ready
        self._all_ready = False
        self._due = 0.0  # when the replicas are asked again

    async def update(self) -> None:
        """Learn from Ray which models there are, and from their replicas how they are, unless that was just now."""
        started = time.monotonic()
        if started < self._due:
            return
        applications = (await asyncio.to_thread(serve.status)).applications
        prefix = f"{FRONT}."
        names = sorted(name.removeprefix(prefix) for name in applications if name.startswith(prefix))
        self.by_name = {name: self.by_name.get(name) or RunningModel(name) for name in names}
        await asyncio.gather(*(model.update(applications[prefix + name]) for name, model in self.by_name.items()))
        replicas = sum(len(model.reports) for model in self.by_name.values())
        self._all_ready = bool(self.by_name) and all(model.is_ready(None) for model in self.by_name.values())
        self._due = started + max(1.0, replicas / _REPORTS_PER_SECOND) - _SLACK_SECONDS

    @property
    def known(self) -> bool:
        """Whether :meth:`update` has succeeded."""
        return self._due > 0

    @property
    def ready(self) -> bool:
        """Whether there are models, and each has a ready version."""
        return self._all_ready and not self.retired

    def is_ready(self, name: str, version: str = "") -> bool:
        """See :meth:`bf16kit.service.contract.Registry.is_ready`."""
        wanted = parse_version(version)
        return name in self.by_name and not self.retired and self.by_name[name].is_ready(wanted)

    def get(self, name: str) -> RunningModel:
        """Return a model in any state. Raises NotFound."""
        if name not in self.by_name:
            raise NotFound(f"unknown model {quoted(name)}")
        return self.by_name[name]

    def index(self) -> list[IndexEntry]:
        return [version for model in self.by_name.values() for version in model.versions]

    async def ask(self, name: str) -> None:
        """Ask the replicas of a model for their reports; "": those of all models."""
        models = [model for model in self.by_name.values() if name in ("", model.name) and model.reports]
        await asyncio.gather(*(model.ask() for model in models))

    def statistics(self, name: str, version: str) -> list[VersionStatistics]:
        """See :meth:`bf16kit.service.operations.RegistryModels.statistics`: sums over the replicas' last reports."""
        models = [self.get(name)] if name or version else list(self.by_name.values())
        wanted = parse_version(version)
        if wanted is not None and not models[0].is_ready(wanted):
            raise NotFound(f"version {version} of model {name!r} is not ready; its replicas' log says why")
        return [each for model in models for each in model.statistics() if wanted in (None, each.version)]
