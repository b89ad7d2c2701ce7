"""A client's ``ModelConfig`` (JSON, sent with a load) on top of ``serving.yaml``.

It may change ``version_policy`` and ``max_batch_size``. All other fields must be as the RPC ModelConfig returns them,
so that a client may send back what it got; whatever differs is rejected by name, rather than ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import SpecEntry
from bf16kit.messages.errors import ArtifactError, ConfigError, InvalidRequest
from bf16kit.messages.wording import brief, quoted
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.service.config.serverconfig import explain
from bf16kit.service.models.plan import DesiredModel, Plan, with_serving
from bf16kit.service.models.serving import Serving

_SUBJECT = "load parameter 'config'"
_REMEDY = "a load can change version_policy and max_batch_size; set everything else in serving.yaml"
_UNSET: tuple[Any, ...] = (None, "", 0, [], {})  # how protobuf's printers write a field that was never set
#: What reports how the model runs: it may have any value, and changes nothing.
_REPORTED = re.compile(
    r"platform|backend|instance_group\.0\.(name|kind|gpus)|input\.\d+\.format|parameters\.(profile|precision"
    r"|accumulation|kernel|device|note|choice|golden|active_precision|active_precision_reason)\.string_value"
)


def with_config(desired: DesiredModel, config: str) -> DesiredModel:
    """Return ``desired`` as ``config`` changes it. Raises InvalidRequest naming the field."""
    changes, others = _parse(config)
    try:
        if broken := [plan.broken for plan in desired.plans if plan.broken]:
            raise ConfigError(broken[0])
        before = desired.plans[0].serving
        if "version_policy" in changes:
            changes["version_policy"] = _version_policy(changes["version_policy"], strict=before.version_policy.strict)
        desired = with_serving(desired, Serving.model_validate({**before.model_dump(exclude_unset=True), **changes}))
    except ValidationError as error:
        raise InvalidRequest(brief(explain(error.errors(), Serving, _SUBJECT))) from None
    except ConfigError as error:
        raise InvalidRequest(f"model {desired.name!r} cannot be served with this configuration: {error}") from None
    for plan in desired.plans:
        shown = _shown(desired.name, plan)
        for field, value in others.items():
            if shown and value not in shown.get(field, ()) and not _REPORTED.fullmatch(field):
                own = f"is {quoted(value)}, the model has {shown[field][0]!r}" if field in shown else "is not supported"
                raise InvalidRequest(brief(f"{_SUBJECT}: {quoted(field)} {own}: {_REMEDY}"))
    return desired


def _parse(config: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields that a load may change, and all others that are set, as :func:`_leaves` names them."""

    def in_snake_case(found: dict[str, Any]) -> dict[str, Any]:
        return {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key): value for key, value in found.items()}

    try:
        given = json.loads(config, object_hook=in_snake_case)  # JSON may have the fields' names in camelCase
        if not isinstance(given, dict):
            raise InvalidRequest(f"{_SUBJECT}: expected a JSON object, a ModelConfig")
        changes = {key: given.pop(key, None) for key in ("max_batch_size", "version_policy")}
        return {key: value for key, value in changes.items() if value is not None}, dict(_leaves(given))
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"{_SUBJECT}: is not JSON: give a ModelConfig, as the RPC of that name returns it"
        ) from None


def _leaves(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields that are set, as "input.0.name", and their values as text."""
    if value in _UNSET:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{field}.{key}".lstrip("."))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{field}.{number}")
    else:
        yield field, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _version_policy(given: Any, *, strict: bool) -> dict[str, Any]:
    """Return Triton's version policy as in ``serving.yaml``; ModelConfig has no field for ``strict``."""
    found = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    match found:
        case {"all": {}} if len(found) == 1:
            return {"all": True}
        case {"latest": {**latest}} if len(found) == 1:
            return {"latest": latest.get("num_versions", 1), "strict": strict}
        case {"specific": {"versions": [*versions]}} if len(found) == 1:
            return {"specific": versions}
    raise InvalidRequest(
        f"{_SUBJECT}: 'version_policy' is {quoted(json.dumps(given)[:100])}: give one of"
        ' {"all": {}}, {"latest": {"num_versions": 1}}, {"specific": {"versions": [1]}}'
    )


def _shown(name: str, plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """Return what the RPC ModelConfig returns for ``serving.yaml`` and the artifact: the values allowed, by field."""
    serving, queue = plan.serving, "dynamic_batching.default_queue_policy"
    shown: dict[str, tuple[str, ...]] = {
        "name": (name,),
        "instance_group.0.count": (str(serving.instances),),
        "dynamic_batching.max_queue_delay_microseconds": (str(round(serving.max_queue_delay_ms * 1e3)),),
        f"{queue}.timeout_action": ("REJECT",),
        f"{queue}.default_timeout_microseconds": (str(round(serving.max_queue_ms * 1e3)),),
        f"{queue}.allow_timeout_override": ("True",),
        f"{queue}.max_queue_size": (str(serving.max_queue_size),),
    }
    try:
        manifest = Artifact.open(plan.path, verify=False).manifest
    except (OSError, ArtifactError):
        return {}  # nothing is compared: the load fails as well, and says why
    for kind, entries in (("input", manifest.inputs), ("output", manifest.outputs)):
        for number, entry in enumerate(entries):
            shown |= {f"{kind}.{number}.{key}": found for key, found in _tensor(entry, manifest.batch_axis).items()}
    return shown


def _tensor(entry: SpecEntry, batch_axis: int | None) -> Mapping[str, tuple[str, ...]]:
    oip = BY_NAME[entry.dtype].oip
    dims = [str(dim) if isinstance(dim, int) else "-1" for dim in entry.shape]
    # ModelConfig leaves the batch dimension out if there is a max_batch_size, which this load may change.
    shown = (dims[1:], dims) if batch_axis == 0 else (dims,)
    return {
        "name": (entry.name,),
        "data_type": ("TYPE_STRING" if oip == "BYTES" else f"TYPE_{oip}",),
        "dims": tuple(", ".join(each) for each in shown),
    }
