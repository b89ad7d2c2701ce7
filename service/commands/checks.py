"""The checks of `bf16-serve check`, in the order in which a server would meet their subjects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from bf16kit.messages.errors import Bf16kitError, ConfigError, NotFound
from bf16kit.messages.wording import brief, quoted
from bf16kit.runtime.ort import kernel
from service.config import ports
from service.config.credentials import certificates_of, reference_ca_of, tokens_of
from service.config.environment import unknown_variables
from service.config.serverconfig import ServerConfig, load_config
from service.config.tokens import SCOPES
from service.config.validity import valid_until
from service.models import loading
from service.models.controller import Controller
from service.models.directory import Directory, desired_model_of, directories_in
from service.models.loads import Loads
from service.models.opening import open_artifact
from service.models.plan import DesiredModel, Plan
from service.models.repository import Repository
from service.regions.files import check_system
from service.server import open_tracing
from service.telemetry.metrics import Metrics

_LONGEST = 1000  # characters of a reason, as in the server's log


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``note``: the server would start, but not serve this."""

    subject: str
    outcome: Literal["ok", "note", "failed"]
    text: str

    def line(self) -> str:
        return f"{self.outcome:<7} {self.subject}: {self.text}"


class Checks:
    """One run of the command. :meth:`run` yields each finding when it is made, and keeps it in ``findings``."""

    def __init__(self, models: tuple[str, ...], *, load: bool, ports: bool) -> None:
        self._models = models
        self._load = load
        self._ports = ports
        self.findings: list[Finding] = []

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.outcome == "failed"]

    def run(self, flags: Mapping[str, Any], file: Path | None) -> Iterator[Finding]:
        """Yield the findings. Raises NotFound for a requested model that the repository does not hold."""
        for finding in self._all(flags, file):
            self.findings.append(finding)
            yield finding

    def summary(self) -> str:
        if not self.failed:
            return "all checks passed"
        return f"{len(self.failed)} of {len(self.findings)} checks failed: this server would not serve everything"

    def _all(self, flags: Mapping[str, Any], file: Path | None) -> Iterator[Finding]:
        try:
            config = load_config(flags, file)
        except ConfigError as error:
            yield Finding("configuration", "failed", str(error))
            return
        yield Finding("configuration", "ok", _sources(flags, file))
        if ignored := unknown_variables(os.environ):
            yield Finding("environment", "note", ignored)
        yield _attempt("CPU kernel", _kernel)
        yield _attempt("TLS", lambda: _tls(config))
        yield _attempt("tokens", lambda: _tokens(config))
        if config.reference_ca is not None:
            yield _attempt("reference over TLS", lambda: _reference(config))
        yield _attempt("shared memory", lambda: _shared_memory(config))
        if self._ports:
            yield _attempt("gRPC port", lambda: _port(config.host, config.grpc_port, "--grpc-port"))
            yield _attempt("HTTP port", lambda: _port(config.host, config.http_port, "--http-port"))
        yield _attempt("traces", lambda: _traces(config))
        yield _attempt("repository", lambda: _repository(config))
        yield from self._all_models(config)

    # --- models -------------------------------------------------------------------------------------------------------

    def _all_models(self, config: ServerConfig) -> Iterator[Finding]:
        """Check the models of the command line, or all: with explicit control any of them may be loaded later."""
        try:
            directories = {directory.name: directory for directory in directories_in(config.repository)}
        except ConfigError:  # the check of the repository has reported it
            return
        for name in self._models:
            if name not in directories:
                raise NotFound(f"the repository has no model {quoted(name)}; it has {', '.join(directories) or 'none'}")
        for name in self._models or directories:
            try:
                desired = desired_model_of(directories[name])
            except ConfigError as error:
                yield Finding(f"model {name!r}", "failed" if self._models else "note", str(error))
                continue
            yield from self._versions(desired, config)

    def _versions(self, desired: DesiredModel, config: ServerConfig) -> Iterator[Finding]:
        failed = False
        for plan in desired.plans:
            subject = f"model {desired.name!r} version {plan.version}"
            finding = _attempt(subject, partial(self._version, plan, config))
            failed = failed or (finding.outcome == "failed" and not plan.broken)
            yield finding
        if failed and desired.plans[0].serving.version_policy.tries_older:
            for older in islice(Directory(config.repository).older(desired), 1):
                text = f"a server that starts would try version {older.version} instead of one that failed"
                yield Finding(f"model {desired.name!r}", "note", text)

    def _version(self, plan: Plan, config: ServerConfig) -> str:
        if plan.broken:
            raise ConfigError(plan.broken)
        if not self._load:
            opened = open_artifact(plan.path, plan.serving)
            return f"every digest matches; {len(opened.artifact.manifest.files)} files, not loaded"
        load = partial(loading.load, plan.path, plan.serving, device=config.device, threads=config.threads)
        loaded = Loads().run(f"version {plan.version}", plan.digest, lambda on_step: load(on_step=on_step))
        loaded.close()
        probe = "" if loaded.info.accumulation == "fp32" else "; it is not known to accumulate in fp32"
        return f"{loaded.summary}{probe}"


def _attempt(subject: str, work: Callable[[], str]) -> Finding:
    """Return the finding of one check. Whatever goes wrong becomes a finding, so that the other checks still run."""
    try:
        return Finding(subject, "ok", work())
    except Bf16kitError as error:
        return Finding(subject, "failed", brief(error, _LONGEST))
    except Exception as bug:  # noqa: BLE001 - the server would take it for a bug in loading, and serve the others
        return Finding(subject, "failed", brief(f"unexpected {type(bug).__name__}: {bug}", _LONGEST))


def _sources(flags: Mapping[str, Any], file: Path | None) -> str:
    """Return, as text, how many settings came from which source; all others have their defaults."""
    given = sum(value is not None for value in flags.values())
    environment = sum(f"BF16KIT_{key}".upper() in os.environ for key in ServerConfig.model_fields)
    return f"{given} flags, {environment} variables of the environment, {file or 'no server.yaml'}"


def _kernel() -> str:
    found = kernel.configured_kernel()
    return f"path {found.path}" if found.path else f"{found.note}: {found.advice}"


def _tls(config: ServerConfig) -> str:
    certificates = certificates_of(config)
    if certificates is None:
        return "off, both ports speak plain text"
    ends = valid_until(certificates.current())
    clients = ", clients show certificates" if certificates.mutual_tls else ""
    return f"{config.tls_certificate} fits its key and is valid until {ends:%Y-%m-%d %H:%M} UTC{clients}"


def _reference(config: ServerConfig) -> str:
    reference_ca_of(config)
    return f"remote fp32 references (grpcs://) are verified with {config.reference_ca}"


def _tokens(config: ServerConfig) -> str:
    return "no token is required" if tokens_of(config) is None else f"{config.token_file}, of {', '.join(SCOPES)}"


def _shared_memory(config: ServerConfig) -> str:
    if not config.shared_memory:
        return "off"
    check_system()
    return f"on, for files of /dev/shm whose names begin with {config.shared_memory_prefix!r}"


def _port(host: str, port: int, flag: str) -> str:
    with ports.listen(host, port, flag) as listener:
        return f"{listener.getsockname()[1]} on {host} {'was' if port == 0 else 'is'} free"


def _traces(config: ServerConfig) -> str:
    _, tracing = open_tracing(config, Repository(Metrics()), lambda outcome, count: None)
    return "off" if tracing is None else f"{config.trace_exporter}, one of {config.trace_rate} requests"


def _repository(config: ServerConfig) -> str:
    """Check the repository. Raises ConfigError if a server would exit, or never be ready."""
    controller = Controller(config.repository, _apply, _apply_all, config.model_control, config.load_model)
    controller.apply_initial()
    count = len(controller.desired_models)
    if not count and config.model_control != "explicit":
        raise ConfigError(
            f"{config.repository} has no model; put artifacts under <model>/<version>/, or it will not be ready"
        )
    later = {"poll": ", and others as they come", "explicit": ", and others as clients ask for them"}
    return f"{config.repository}, {count} model{'s'[: count != 1]} at start{later.get(config.model_control, '')}"


def _apply(desired: DesiredModel) -> Future[None]:
    """Accept a desired model as a reconciler would, but load nothing."""
    return Future()


def _apply_all(desired_models: Iterable[DesiredModel]) -> dict[str, Future[None]]:
    """Accept all desired models as a reconciler would, but load nothing."""
    return {}
