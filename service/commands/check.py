"""``bf16-serve check``: checks whether a server with these options would serve, and reports what prevents it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from bf16kit.messages.errors import Bf16kitError, ConfigError, NotFound
from bf16kit.messages.wording import brief, quoted
from bf16kit.runtime.ort import kernel
from bf16kit.service.commands import output
from bf16kit.service.config.certificates import certificates_of, tokens_of
from bf16kit.service.config.logs import configure
from bf16kit.service.config.resources import bound_heap
from bf16kit.service.config.serverconfig import ENV_PREFIX, ServerConfig, load_config, unknown_variables
from bf16kit.service.config.tokens import SCOPES
from bf16kit.service.models import loading
from bf16kit.service.models.controller import Controller
from bf16kit.service.models.loads import Loads
from bf16kit.service.models.opened import open_artifact
from bf16kit.service.models.plan import DesiredModel, Directory, Plan, desired_model_of, directories_in
from bf16kit.service.models.repository import Repository
from bf16kit.service.server import open_tracing
from bf16kit.service.telemetry.metrics import Metrics

_LONGEST = 1000  # characters of a reason, as in the server's log


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``note``: the server would start, but not serve this."""

    subject: str
    outcome: Literal["ok", "note", "failed"]
    text: str


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--load/--no-load", default=True, help="Load each model, and run its golden samples, as a server does.")
@output.as_json
def check(models: tuple[str, ...], load: bool, as_json: bool, file: Path | None, **flags: object) -> None:
    """Check configuration, TLS and token files, and every model (or only MODEL), with the server's own code.

    Takes all options of the server, its environment and server.yaml. One model is loaded at a time and freed
    again. Exit codes: 0 all checks passed; 1 a check failed, and its line says why; 2 wrong usage.
    """
    bound_heap()
    configure("error")
    findings: list[Finding] = []
    with output.exit_on_errors("check"):
        for finding in _findings(flags, file, models, load=load):
            findings.append(finding)
            if not as_json:
                output.echo(f"{finding.outcome:<7} {finding.subject}: {finding.text}")
    failed = sum(finding.outcome == "failed" for finding in findings)
    if as_json:
        output.echo_json({"version": 1, "ok": not failed, "findings": findings})
    elif failed:
        output.echo(f"{failed} of {len(findings)} checks failed: this server would not serve everything")
    else:
        output.echo("all checks passed")
    sys.exit(output.FAILED if failed else 0)


def _findings(flags: Mapping[str, Any], file: Path | None, models: tuple[str, ...], *, load: bool) -> Iterator[Finding]:
    """Yield a finding for each subject, in the order in which a server would meet it.

    Raises ConfigError as a server would that cannot start, NotFound for a requested model that is not there.
    """
    config = load_config(flags, file)
    given = sum(value not in (None, ()) for value in flags.values())  # () is --load-model, not given
    variables = sum(f"{ENV_PREFIX}{key.upper()}" in os.environ for key in ServerConfig.model_fields)
    sources = f"flags: {given}; variables of the environment: {variables}; {file or 'no server.yaml'}"
    yield Finding("configuration", "ok", sources)
    if ignored := unknown_variables(os.environ):
        yield Finding("environment", "note", ignored)
    yield _attempt("CPU kernel", _kernel)
    yield _attempt("TLS", partial(_tls, config))
    yield _attempt("tokens", partial(_tokens, config))
    yield _attempt("shared memory", partial(_shared_memory, config))
    yield _attempt("traces", partial(_traces, config))
    yield _attempt("repository", partial(_repository, config))
    yield from _models(config, models, load)


def _attempt(subject: str, work: Callable[[], str]) -> Finding:
    """Return the finding of one check. Whatever goes wrong becomes a finding, so that the other checks still run."""
    try:
        return Finding(subject, "ok", work())
    except Bf16kitError as error:
        return Finding(subject, "failed", brief(error, _LONGEST))
    except Exception as bug:  # noqa: BLE001 - the server would take it for a bug in loading, and serve the others
        return Finding(subject, "failed", brief(f"unexpected {type(bug).__name__}: {bug}", _LONGEST))


def _kernel() -> str:
    found = kernel.configured_kernel()
    return f"path {found.path}" if found.path else f"{found.note}: {found.advice}"


def _tls(config: ServerConfig) -> str:
    certificates = certificates_of(config)
    if certificates is None:
        return "off, both ports speak plain text"
    ends = certificates.current().valid_until()
    clients = ", clients show certificates" if certificates.mutual_tls else ""
    return f"{config.tls_certificate} fits its key and is valid until {ends:%Y-%m-%d %H:%M} UTC{clients}"


def _tokens(config: ServerConfig) -> str:
    return "no token is required" if tokens_of(config) is None else f"{config.token_file}, of {', '.join(SCOPES)}"


def _shared_memory(config: ServerConfig) -> str:
    if not config.shared_memory:
        return "off"
    return f"on, for files of /dev/shm whose names begin with {config.region_prefix!r}"


def _traces(config: ServerConfig) -> str:
    _, tracing = open_tracing(config, Repository(Metrics()), lambda outcome, count: None)
    if tracing is not None:
        tracing.close(1.0)
    return "off" if tracing is None else f"one of {config.trace_rate} requests, by OTLP"


def _repository(config: ServerConfig) -> str:
    """Check the repository, without loading. Raises ConfigError if a server would exit, or never be ready."""

    controller = Controller(
        config.repository,
        lambda model: Future(),
        lambda models: {model.name: Future() for model in models},
        config.model_control,
        config.load_model,
    )
    controller.apply_initial()
    count = len(controller.desired_models)
    if not count and config.model_control != "explicit":
        raise ConfigError(
            f"{config.repository} has no model; put artifacts under <model>/<version>/, or it will not be ready"
        )
    later = {"poll": ", and others as they come", "explicit": ", and others as clients ask for them"}
    return f"{config.repository}, {count} model{'s'[: count != 1]} at start{later.get(config.model_control, '')}"


def _models(config: ServerConfig, names: tuple[str, ...], load: bool) -> Iterator[Finding]:
    """Check the models of the command line, or all: with explicit control any of them may be loaded later."""
    try:
        directories = model_directories(config.repository, names)
    except ConfigError:  # the check of the repository has reported it
        return
    for directory in directories:
        try:
            desired = desired_model_of(directory)
        except ConfigError as error:
            yield Finding(f"model {directory.name!r}", "failed" if names else "note", str(error))
            continue
        yield from _versions(desired, config, load)


def model_directories(root: Path, names: tuple[str, ...] = ()) -> list[Path]:
    """Return the directories of these models, or of all. Raises NotFound for a model that is not there."""
    directories = {directory.name: directory for directory in directories_in(root)}
    for name in names:
        if name not in directories:
            raise NotFound(f"the repository has no model {quoted(name)}; it has {', '.join(directories) or 'none'}")
    return [directories[name] for name in names or directories]


def _versions(desired: DesiredModel, config: ServerConfig, load: bool) -> Iterator[Finding]:
    failed = False
    for plan in desired.plans:
        finding = _attempt(f"model {desired.name!r} version {plan.version}", partial(_version, plan, config, load))
        failed = failed or (finding.outcome == "failed" and not plan.broken)
        yield finding
    if failed and desired.plans[0].serving.version_policy.tries_older:
        older = next(Directory(config.repository).older(desired), None)
        if older is not None:
            text = f"a server that starts would try version {older.version} instead of one that failed"
            yield Finding(f"model {desired.name!r}", "note", text)


def _version(plan: Plan, config: ServerConfig, load: bool) -> str:
    if plan.broken:
        raise ConfigError(plan.broken)
    if not load:
        opened = open_artifact(plan.path, plan.serving)
        return f"every digest matches; {len(opened.artifact.manifest.files)} files, not loaded"
    loader = partial(loading.load, plan.path, plan.serving, device=config.device, threads=config.threads)
    loaded = Loads().run(f"version {plan.version}", loader)
    loaded.close()
    probe = "" if loaded.info.accumulation == "fp32" else "; it is not known to accumulate in fp32"
    return f"{loaded.summary}{probe}"
