"""Checks of the repository: its index, and models that are loaded and unloaded while the server runs.

Only the model that the user names with ``--control`` is loaded and unloaded; it is loaded again at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from oip_conformance.checks.metadata import UNKNOWN_NAME
from oip_conformance.checks.sources import OBSERVED, extension
from oip_conformance.models import Model
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.session import Session
from oip_conformance.suite import MUST, TRITON, Check, Code, InvalidCall, Skipped, check, must, refusal
from oip_conformance.target import Response

_NEEDS = "model_repository"
_SOURCE = extension(_NEEDS)
_GONE = (Code.NOT_FOUND, Code.UNAVAILABLE)


def _index(session: Session, *, ready: bool = False) -> list[pb.RepositoryIndexResponse.ModelIndex]:
    response = session.target.call(pb.RepositoryIndexRequest(ready=ready))
    must(response.ok, "the index", response, f"ready={ready}")
    return list(response.message.models)


def _load(session: Session, name: str, **parameters: str | int) -> Response:
    request = pb.RepositoryModelLoadRequest(model_name=name)
    for key, value in parameters.items():
        if isinstance(value, str):
            request.parameters[key].string_param = value
        else:
            request.parameters[key].int64_param = value
    return session.target.call(request, timeout=60)


def _unload(session: Session, name: str) -> Response:
    return session.target.call(pb.RepositoryModelUnloadRequest(model_name=name), timeout=60)


def _ready(session: Session, name: str) -> bool:
    response = session.target.call(pb.ModelReadyRequest(name=name))
    return response.ok and bool(response.message.ready)


def _controlled(session: Session) -> Model:
    """Return the model that may be unloaded. Skips if the user named none."""
    name = session.options.control
    if not name:
        raise Skipped("no model to unload and load again was named with --control")
    for model in session.models:
        if model.name == name:
            return model
    raise Skipped(f"--control {name}: the server has no such model ready")


@check("index.models", MUST, _SOURCE, "RepositoryIndex gives every model available: name, version, state.", _NEEDS)
def models(session: Session) -> None:
    listed = {(m.name, m.version): m.state for m in _index(session)}
    for model in session.models:
        for version in model.metadata.versions:
            state = listed.get((model.name, version))
            must(state == "READY", f"{model.name!r} version {version} as READY", state or "nothing of it")


@check("index.ready", MUST, _SOURCE, "ready: if true return only models currently ready for inferencing.", _NEEDS)
def ready_only(session: Session) -> None:
    listed = _index(session, ready=True)
    must(all(m.state in ("READY", "") for m in listed), "models that are READY", [m.state for m in listed])
    everything = {(m.name, m.version) for m in _index(session) if m.state == "READY"}
    must({(m.name, m.version) for m in listed} == everything, f"those that are ready: {sorted(everything)}", listed)


NAMED_REPOSITORY = refusal(
    "index.named-repository", TRITON, OBSERVED, "An index of a named repository is rejected.",
    [Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT, Code.NOT_FOUND],
    lambda session: InvalidCall(pb.RepositoryIndexRequest(repository_name=UNKNOWN_NAME), ["repository_name"]), _NEEDS,
)  # fmt: skip


@check(
    "control.unload",
    MUST,
    _SOURCE,
    "RepositoryModelUnload unloads a model: it is not ready, and no longer answers.",
    _NEEDS,
)
def unload(session: Session) -> None:
    model = _controlled(session)
    try:
        response = _unload(session, model.name)
        must(response.ok, "an empty answer", response, model.name)
        deadline = time.monotonic() + session.options.patience
        while _ready(session, model.name) and time.monotonic() < deadline:
            time.sleep(0.05)
        must(not _ready(session, model.name), "ready: false", "ready: true", model.name)
        request = session.request(model)
        refused = session.target.call(request)
        must(refused.code in _GONE, "NOT_FOUND or UNAVAILABLE", refused, request)
        listed = [m for m in _index(session) if m.name == model.name]
        must(all(m.state != "READY" for m in listed), "no version of it READY", listed)
        must(
            model.name not in {m.name for m in _index(session, ready=True)},
            "an index of what is ready without it",
            listed,
        )
    finally:
        _load(session, model.name)


@check(
    "control.load", MUST, _SOURCE, "RepositoryModelLoad loads a model: when it is answered, the model is ready.", _NEEDS
)
def load(session: Session) -> None:
    model = _controlled(session)
    _unload(session, model.name)
    response = _load(session, model.name)
    must(response.ok, "an empty answer", response, model.name)
    must(_ready(session, model.name), "ready: true", "ready: false", model.name)
    session.outputs(session.request(model), model)


@check(
    "control.reload",
    MUST,
    _SOURCE,
    "RepositoryModelLoad of a loaded model reloads it; requests meanwhile are answered.",
    _NEEDS,
)
def reload(session: Session) -> None:
    model = _controlled(session)
    session.outputs(session.request(model), model)
    loading = session.target.start(pb.RepositoryModelLoadRequest(model_name=model.name))
    sent = 0
    while not loading.done() or not sent:
        session.outputs(session.request(model), model)
        sent += 1
    response = session.target.finish(loading)
    must(response.ok, "an empty answer", response, model.name)
    session.outputs(session.request(model), model)


@check(
    "control.unload-twice", TRITON, OBSERVED, "Unload of a model that is not loaded is no error (or NOT_FOUND).", _NEEDS
)
def unload_twice(session: Session) -> None:
    model = _controlled(session)
    try:
        _unload(session, model.name)
        for name in (model.name, UNKNOWN_NAME):
            response = _unload(session, name)
            must(response.ok or response.code is Code.NOT_FOUND, "an empty answer or NOT_FOUND", response, name)
    finally:
        _load(session, model.name)


def _bad_load(name: str, rule: str, codes: list[Code], call: Callable[[Session, Model], Response]) -> Check:
    def run(session: Session) -> None:
        model = _controlled(session)
        response = call(session, model)
        must(response.code in codes, " or ".join(code.name for code in codes), response, name)
        session.outputs(session.request(model), model)

    return Check(f"control.{name}", TRITON, OBSERVED, f"{rule} The model goes on serving.", run, _NEEDS)


_INVALID, _CANNOT = [Code.INVALID_ARGUMENT], [Code.INTERNAL, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNIMPLEMENTED]
UNKNOWN_MODEL = _bad_load(
    "load-unknown", "Load of an unknown model is rejected.", _CANNOT, lambda s, m: _load(s, UNKNOWN_NAME)
)
UNKNOWN_PARAMETER = _bad_load("load-unknown-parameter", "Unknown parameters of a load are rejected.", [*_INVALID, Code.UNIMPLEMENTED], lambda s, m: _load(s, m.name, conformance="x"))  # fmt: skip
CONFIG_NUMBER = _bad_load(
    "load-config-a-number",
    "config is a string.",
    [*_INVALID, Code.UNIMPLEMENTED],
    lambda s, m: _load(s, m.name, config=3),
)
CONFIG_DAMAGED = _bad_load(
    "load-config-damaged", "A config that is not JSON is rejected.", _CANNOT, lambda s, m: _load(s, m.name, config="{")
)
CONFIG_UNKNOWN = _bad_load("load-config-unknown-field", "A config with fields that ModelConfig does not have is rejected.", _CANNOT, lambda s, m: _load(s, m.name, config='{"conformance": 1}'))  # fmt: skip
