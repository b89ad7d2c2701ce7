"""Checks the parameters of requests to load or unload a model."""

from __future__ import annotations

from collections.abc import Mapping

from bf16kit.messages.errors import InvalidRequest, Unsupported
from bf16kit.messages.wording import quoted
from bf16kit.protocol import inference_pb2 as pb

Parameters = Mapping[str, pb.ModelRepositoryParameter]
_FILE = "file:"


def check_repository(name: str) -> None:
    """Raise Unsupported for a named repository: there is one only, without a name."""
    if name:
        raise Unsupported("named repositories are not supported; leave repository_name empty")


def load_config(parameters: Parameters) -> str | None:
    """Return the parameter ``config`` of a load. Raises InvalidRequest naming any other parameter."""
    for name, parameter in parameters.items():
        if name.startswith(_FILE):
            raise InvalidRequest(
                f"load parameter {quoted(name)}: files are not accepted over the network; put the artifact into the"
                " repository, and load it from there"
            )
        if name != "config":
            raise InvalidRequest(f"load parameter {quoted(name)} is not known; the only one is 'config'")
        _check_kind(f"load parameter {name!r}", parameter, "string_param")
    return parameters["config"].string_param if "config" in parameters else None


def check_unload(parameters: Parameters) -> None:
    """Check the parameters of an unload. Raises InvalidRequest naming any but ``unload_dependents``.

    No model depends on another here, so ``unload_dependents`` changes nothing.
    """
    for name, parameter in parameters.items():
        if name != "unload_dependents":
            raise InvalidRequest(f"unload parameter {quoted(name)} is not known; the only one is 'unload_dependents'")
        _check_kind(f"unload parameter {name!r}", parameter, "bool_param")


def _check_kind(what: str, parameter: pb.ModelRepositoryParameter, kind: str) -> None:
    given = parameter.WhichOneof("parameter_choice")
    if given != kind:
        raise InvalidRequest(f"{what} came as {given or 'nothing'}, expected {kind}")
