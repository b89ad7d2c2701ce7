"""Schemas of the custom resources in deploy/. They allow only the fields that deploy/ uses.

No package contains these definitions. The names, types and bounds are those of the types from which the projects
generate their definitions: Prometheus Operator, `pkg/apis/monitoring/v1` (https://prometheus-operator.dev/docs/api-reference/api/),
and KServe, `pkg/apis/serving/v1alpha1/servingruntime_types.go` and `v1beta1`
(https://kserve.github.io/website/docs/reference/crd-api). A check against these schemas finds a field that is
misspelt, misplaced or of another type. It does not cover fields that are not used here, defaults, or what the projects'
webhooks reject. Containers and volumes are checked against Kubernetes' own schema.
"""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
TRUE_OR_FALSE: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: Schema = {
    "type": "string",
    "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
    "minLength": 1,
}
LIST: Schema = {"type": "array", "minItems": 1}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(of: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": of}


def _kind(version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object(("name",), name=TEXT, namespace=TEXT, labels=STRINGS, annotations=STRINGS)
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version}, kind={"const": kind}, metadata=metadata, spec=spec,
    )  # fmt: skip


_RULE = _object(
    ("expr",),
    record=TEXT, alert=TEXT, expr={"type": ["string", "integer"]}, keep_firing_for=DURATION,
    labels=STRINGS, annotations=STRINGS, **{"for": DURATION},
)  # fmt: skip
_GROUP = _object(("name",), name=TEXT, interval=DURATION, rules=_list(_RULE))

_KEY = _object(("name", "key"), name=TEXT, key=TEXT)  # of a Secret or a ConfigMap
_TLS = _object(ca=_object(secret=_KEY, configMap=_KEY), serverName=TEXT)
_ENDPOINT = _object(
    tlsConfig=_TLS,
    authorization=_object(type=TEXT, credentials=_KEY),
    port=TEXT,
    path=TEXT,
    scheme={"enum": ["http", "https", "HTTP", "HTTPS"]},
    interval=DURATION,
    scrapeTimeout=DURATION,
)
_MONITOR = _object(
    ("endpoints", "selector"),
    jobLabel=TEXT, selector=_object(matchLabels=STRINGS), endpoints=_list(_ENDPOINT),
)  # fmt: skip

_FORMAT = _object(
    ("name",), name=TEXT, version=TEXT, autoSelect=TRUE_OR_FALSE, priority={"type": "integer", "minimum": 1}
)
_PROTOCOL: Schema = {"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}
_RUNTIME = _object(
    ("containers",),
    annotations=STRINGS, labels=STRINGS, supportedModelFormats=_list(_FORMAT), protocolVersions=_list(_PROTOCOL),
    containers=LIST, volumes=LIST,
)  # fmt: skip

_MODEL = _object(
    ("modelFormat",),
    modelFormat=_object(("name",), name=TEXT, version=TEXT), protocolVersion=_PROTOCOL, storageUri=TEXT, runtime=TEXT,
)  # fmt: skip
_PREDICTOR = _object(
    minReplicas=COUNT, maxReplicas=COUNT, scaleMetric={"enum": ["cpu", "memory", "concurrency", "rps"]},
    scaleTarget={"type": "integer", "minimum": 1}, automountServiceAccountToken=TRUE_OR_FALSE, model=_MODEL,
)  # fmt: skip

SCHEMAS: Mapping[tuple[str, str], Schema] = {
    (version, kind): _kind(version, kind, spec)
    for version, kind, spec in (
        ("monitoring.coreos.com/v1", "PrometheusRule", _object(groups=_list(_GROUP))),
        ("monitoring.coreos.com/v1", "ServiceMonitor", _MONITOR),
        ("serving.kserve.io/v1alpha1", "ClusterServingRuntime", _RUNTIME),
        ("serving.kserve.io/v1beta1", "InferenceService", _object(("predictor",), predictor=_PREDICTOR)),
    )
}
