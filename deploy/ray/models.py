"""The models that Ray runs: their handles, and what their replicas report. Nothing of it outlasts the front."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.messages.wording import quoted
from deploy.ray.rpcs import FRONT
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from service.models.repository import parse_version
from service.operations import IndexEntry, VersionStatistics

_log = logging.getLogger(__name__)
RAY_ERRORS = (RayError, RayServeException, TimeoutError)
_STATES = ("READY", "LOADING", "UNAVAILABLE")  # the best first: a version has the state of its best replica
_REPORTS_PER_SECOND = 100  # of all replicas together, to one front: many replicas are asked less often
_SLACK_SECONDS = 0.2  # by which Ray's calls each second may be early
_REPORT_SECONDS = 0.9  # for the reports of all replicas of a model; without them, their last ones count
_REASONS = re.compile(r"the model cannot be served: (version \d+: .*)")  # Replica raises it, Ray tells it
_REASON = re.compile(r"version (\d+): (.*?)(?=; version \d+: |$)")


class Report(NamedTuple):
    """What a replica reports: its versions and their counts. ``target`` is the address at which it is scraped."""

    target: str
    versions: Sequence[IndexEntry]
    statistics: Sequence[VersionStatistics]


class RunningModel:
    """One model: its application's handle, Ray's status of it, and the newest reports of its replicas."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reports: Sequence[Report] = ()
        self._handle: Any = None
        self._status = self._message = ""
        self._failed: list[IndexEntry] = []  # versions of the last replica that could not be started

    async def update(self, application: Any) -> None:
        """Take Ray's status of the application, and ask its replicas for their reports."""
        self._status, self._message = application.status.value, brief_message(application)
        deployments = application.deployments.values()
        reasons = _REASONS.search("\n".join([application.message, *(each.message for each in deployments)]))
        found = _REASON.findall(reasons[1]) if reasons else ()
        self._failed = [IndexEntry(self.name, version, "UNAVAILABLE", reason) for version, reason in found]
        if self._handle is None:
            with contextlib.suppress(*RAY_ERRORS):  # it was removed just now
                self._handle = await asyncio.to_thread(serve.get_app_handle, f"{FRONT}.{self.name}")
        if self._handle is not None and any(each.replica_states.get("RUNNING") for each in deployments):
            await self.ask()
        else:
            self.reports = ()

    async def ask(self) -> None:
        """Ask all replicas for a report. If one is late, all keep their last reports, and the log says so."""
        try:
            self.reports = await self._handle.broadcast("report").results_async(timeout_s=_REPORT_SECONDS)
        except RAY_ERRORS as error:
            _log.warning("replicas of %r count with their last reports: %s", self.name, type(error).__name__)

    @property
    def gave_up(self) -> bool:
        """Whether no replica runs and Ray starts none."""
        return self._status == "DEPLOY_FAILED" and not self.reports

    def versions(self) -> list[IndexEntry]:
        """Return the versions that replicas report, or that could not be started, ascending."""
        best: dict[str, IndexEntry] = {each.version: each for each in self._failed}
        for each in (version for report in self.reports for version in report.versions):
            known = best.get(each.version)
            if known is None or _STATES.index(each.state) < _STATES.index(known.state):
                best[each.version] = each
        if not best:
            state = "UNAVAILABLE" if self.gave_up else "LOADING"
            return [IndexEntry(self.name, "", state, f"no replica runs; Ray: {self._status}: {self._message}")]
        return sorted(best.values(), key=lambda each: int(each.version))

    def find(self, version: str) -> IndexEntry:
        """Return the version that a client names, or the newest of the best state. Raises NotFound, InvalidRequest."""
        wanted, found = parse_version(version), self.versions()
        if wanted is None or not found[0].version:
            return min(reversed(found), key=lambda each: _STATES.index(each.state))
        for each in found:
            if int(each.version) == wanted:
                return each
        known = ", ".join(each.version for each in found)
        raise NotFound(f"model {self.name!r} has no version {wanted}; it has {known}")

    def handle(self, version: str) -> Any:
        """Return the handle of a model that has or may get a replica. Raises as one server does: NotFound, Unavailable.

        Which versions the replicas have is theirs to say: there may be newer ones than the last reports named.
        """
        if self.gave_up:
            self.find(version)
            which = f"version {version}" if version else "no version"
            raise NotFound(
                f"{which} of model {self.name!r} is {'not ' if version else ''}ready; its replicas' log says why"
            )
        if self._handle is None:
            raise Unavailable(f"model {self.name!r} is loading; try again later")
        return self._handle

    def statistics(self) -> list[VersionStatistics]:
        """Return the sums of all replicas for each version."""
        total: dict[int, VersionStatistics] = {}
        for each in (counted for report in self.reports for counted in report.statistics):
            known = total.get(each.version)
            snapshot = each.snapshot if known is None else known.snapshot + each.snapshot
            total[each.version] = VersionStatistics(each.name, each.version, each.device, snapshot)
        return [total[version] for version in sorted(total)]


def brief_message(application: Any) -> str:
    """Return what Ray says about an application, on one line: of a traceback the first and the last."""
    said = "\n".join(each.message for each in application.deployments.values()).strip().splitlines()
    return " … ".join(dict.fromkeys([*said[:1], *said[-1:]]))


class RunningModels:
    """All models, by the applications that Ray runs. For one event loop."""

    def __init__(self) -> None:
        self.by_name: dict[str, RunningModel] = {}
        self.changed = asyncio.Event()  # set, and replaced by another, after each change of a state
        self._due = 0.0  # when the replicas are asked again
        self._retired = False

    async def update(self) -> None:
        """Learn from Ray which models there are, and from their replicas how they are, unless that was just now."""
        started = time.monotonic()
        if started < self._due:
            return
        applications = (await asyncio.to_thread(serve.status)).applications
        before, prefix = self.index(), f"{FRONT}."
        names = sorted(name.removeprefix(prefix) for name in applications if name.startswith(prefix))
        self.by_name = {name: self.by_name.get(name) or RunningModel(name) for name in names}
        await asyncio.gather(*(model.update(applications[prefix + name]) for name, model in self.by_name.items()))
        replicas = sum(len(model.reports) for model in self.by_name.values())
        self._due = started + max(1.0, replicas / _REPORTS_PER_SECOND) - _SLACK_SECONDS
        if self.index() != before:
            self._notify()

    @property
    def known(self) -> bool:
        """Whether :meth:`update` has succeeded."""
        return self._due > 0

    def retire(self) -> None:
        """Be not ready from now on."""
        self._retired = True
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether there are models, and each has a ready version."""
        return bool(self.by_name) and all(map(self.is_ready, self.by_name))

    def is_ready(self, name: str, version: str = "") -> bool:
        """See :meth:`service.contract.Registry.is_ready`."""
        parse_version(version)
        with contextlib.suppress(NotFound):
            return self.get(name).find(version).state == "READY" and not self._retired
        return False

    def get(self, name: str) -> RunningModel:
        """Return a model in any state. Raises NotFound."""
        if name not in self.by_name:
            raise NotFound(f"unknown model {quoted(name)}")
        return self.by_name[name]

    def index(self) -> list[IndexEntry]:
        return [version for model in self.by_name.values() for version in model.versions()]

    async def statistics(self, name: str, version: str) -> list[VersionStatistics]:
        """See :meth:`service.operations.RegistryModels.statistics`: sums over all replicas, which are asked now."""
        models = [self.get(name)] if name else list(self.by_name.values())
        wanted = parse_version(version)
        await asyncio.gather(*(model.ask() for model in models if model.reports))
        if wanted is not None and (found := models[0].find(version)).state != "READY":
            raise NotFound(f"version {version} of model {found.name!r} is not ready; its replicas' log says why")
        return [each for model in models for each in model.statistics() if wanted in (None, each.version)]
