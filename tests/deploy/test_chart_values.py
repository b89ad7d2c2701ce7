"""The values of the Helm chart: each has an effect, and values that would stop a pod from serving are rejected."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import CHART, Refused, charted, charted_by, check, needs_schemas, needs_tools

pytestmark = [pytest.mark.manifests, needs_tools]
EVERYTHING = "monitoring.enabled=true,autoscaling.enabled=true"
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
TLS = {"tls_certificate": "/etc/bf16kit-secret/tls.crt", "tls_key": "/etc/bf16kit-secret/tls.key"}
NAMES = ("a.b", "123", "true", "null", "1e5", "0x1f", "a--b", "x" * 53, "x" * 49 + "-yyy", "bf16kit.v2")
# For each value, another valid one, and the other values that must change too for it to have an effect.
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "image.repository": ("registry.example:5000/bf16kit", {}),
    "image.tag": ("1.0", {}),
    "image.digest": ("sha256:" + "0" * 64, {}),
    "image.pullPolicy": ("Always", {}),
    "imagePullSecrets": ([{"name": "7"}], {}),
    "replicas": (3, {"autoscaling": {"enabled": False}}),
    "rollingUpdate.maxSurge": ("50%", {}),
    "rollingUpdate.maxUnavailable": (1, {}),
    "config": ({"threads": 3}, {}),
    "terminationGracePeriodSeconds": (1_000_000, {}),
    "initContainers": ([{"name": "a", "image": "b"}], {}),
    "models.podStorage": ("1Gi", {}),
    "env": ([{"name": "BF16KIT_DEVICE", "value": "cuda:0"}], {}),
    "models.existingClaim": ("123", {}),
    "models.size": ("1.5Ti", {}),
    "models.accessModes": (["ReadWriteOnce", "ReadOnlyMany"], {}),
    "models.storageClassName": ("", {}),
    "resources": ({"limits": {"cpu": 3, "nvidia.com/gpu": 1}, "requests": {"cpu": 2.5}}, {}),
    "scratchSize": ("8", {}),
    "nodeSelector": ({"gpu": "true", "zone": "1e5"}, {}),
    "tolerations": ([{"key": "gpu", "operator": "Exists"}], {}),
    "affinity": ({"podAntiAffinity": {}}, {}),
    "podAnnotations": ({"note": "several\nlines: with 'quotes' and \"others\"\n  # {{ braces }}"}, {}),
    "podLabels": ({"team": "1"}, {}),
    "priorityClassName": ("123", {}),
    "runtimeClassName": ("nvidia", {}),
    "existingSecret": ("123", {"config": TLS}),
    "networkPolicy.enabled": (False, {}),
    "networkPolicy.clientLabels": ({"team": "1"}, {}),
    "networkPolicy.monitoringNamespace": ("123", {}),
    "networkPolicy.extraEgress": ([{"ports": [{"port": 4317}]}], {}),
    "podDisruptionBudget.enabled": (False, {}),
    "podDisruptionBudget.maxUnavailable": ("25%", {}),
    "autoscaling.enabled": (False, {}),
    "autoscaling.minReplicas": (3, {}),
    "autoscaling.maxReplicas": (1_000_000, {}),
    "autoscaling.queueP95": ("1", {}),
    "autoscaling.cpuUtilization": (None, {}),
    "monitoring.enabled": (False, {}),
    "monitoring.interval": ("5s", {}),
    "monitoring.rules": (False, {}),
    "monitoring.labels": ({"release": "1"}, {}),
    "monitoring.endpoint": ({"authorization": {"credentials": {"name": "s", "key": "token"}}}, {}),
}


def leaves(schema: Any, values: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the values that are set individually."""
    for key, each in schema["properties"].items():
        here = f"{path}{key}"
        if key in ("global", "config", "resources") or "properties" not in each:
            yield here
        else:
            yield from leaves(each, values[key], f"{here}.")


def test_every_value_is_in_this_table() -> None:
    assert set(OTHERS) == set(leaves(SCHEMA, VALUES)) - {"global"}


@pytest.mark.parametrize("path", OTHERS)
@needs_schemas
def test_each_value_changes_the_manifests_and_they_stay_valid(path: str, tmp_path: Path) -> None:
    """A value without an effect is ignored silently; a value rendered without quotes becomes a number or two keys."""
    value, rest = OTHERS[path]
    for key in reversed(path.split(".")):
        value = {key: value}
    everything = {"monitoring": {"enabled": True}, "autoscaling": {"enabled": True}}
    before = charted("--set", EVERYTHING)
    if rest and path != "existingSecret":  # the chart rejects these settings without it
        before = charted_by(tmp_path / "before.yaml", merged(everything, rest))
    after = charted_by(tmp_path / "values.yaml", merged(merged(everything, rest), value))
    assert after != before
    for manifest in after:
        if manifest not in before:
            check(manifest)


def merged(one: Any, other: Any) -> Any:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return {key: merged(one.get(key), other[key]) if key in other else one[key] for key in {**one, **other}}


@pytest.mark.parametrize("release", NAMES)
@needs_schemas
def test_any_release_name_valid_for_helm_gives_names_valid_for_kubernetes(release: str) -> None:
    manifests = charted("--set", f"{EVERYTHING},monitoring.rules=false", release=release)
    for manifest in manifests:
        check(manifest)
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", manifest["metadata"]["name"]), manifest["metadata"]
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == release


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ("config.grcp_port=8001", "grcp_port"),
        ("replica=3", "replica"),
        ("replicas=three", "replicas"),
        ("config.repository=models", "repository"),
        ("config.repository=/tmp", "repository"),
        ("config.repository=/etc/bf16kit", "repository"),
        ("config.host=127.0.0.1", "host"),  # neither kubelet nor a client could reach it
        ("config.workers=65", "workers"),
        ("config.tls_certificate=/a", "tls_key"),
        ("config.evidence=true", "token_file"),
        ("config.load_model={m}", "model_control"),
        ("config.http_port=8001", "grpc_port and config.http_port are both 8001"),
        ("models.size=10 gigabytes", "size"),
        ("models.accessModes={ReadWriteOncePod}", "accessModes"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("image.digest=latest", "digest"),
        ("autoscaling.cpuUtilization=700", "cpuUtilization"),
        ("autoscaling.enabled=true,autoscaling.minReplicas=11", "minReplicas is 11, more than maxReplicas .10."),
        ("networkPolicy.clientLabels=null", "clientLabels"),  # an empty selector matches everything
        ("podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),  # no node could be drained
        ("podDisruptionBudget.maxUnavailable=0%", "maxUnavailable"),
        ("rollingUpdate.maxSurge=0", "rollingUpdate"),  # no pod could ever be replaced
        ("terminationGracePeriodSeconds=39", "less than lame_duck_seconds . drain_seconds . 5 .40."),
        ("config.drain_seconds=60", "terminationGracePeriodSeconds is 45"),
        ("podLabels.app\\.kubernetes\\.io/name=mine", "app.kubernetes.io/name"),
        ("monitoring.endpoint.interval=1s", "interval"),
        ("env[0].name=BF16KIT_GRPC_PORT", "BF16KIT_GRPC_PORT, which would override"),
        ("env[0].name=BF16KIT_TLS_CERTIFICATE", "BF16KIT_TLS_CERTIFICATE, which would override"),
        ("env[0].name=BF16KIT_THREADS,config.threads=1", "BF16KIT_THREADS, which would override"),
        ("env[0].nam=A", "nam"),
        ("existingSecret=mine", "no key of config names a file of it"),
        ("config.token_file=/etc/bf16kit-secret/tokens", "token_file is a file of the Secret that existingSecret"),
    ],
)
def test_impossible_values_are_rejected_by_name(values: str, told: str) -> None:
    with pytest.raises(Refused, match=told):
        charted("--set", values)


def test_fractions_of_seconds_count_in_the_check_against_the_grace_period(tmp_path: Path) -> None:
    """10.9 + 24.9 + 5 is more than 40."""
    values = {"terminationGracePeriodSeconds": 40, "config": {"lame_duck_seconds": 10.9, "drain_seconds": 24.9}}
    with pytest.raises(Refused, match=r"\(40\.8\)"):
        charted_by(tmp_path / "values.yaml", values)


def test_the_schema_rejects_unknown_keys_at_every_level() -> None:
    """A part of the schema that accepts any key would accept a misspelt one."""
    anything = {  # Kubernetes' own types, and maps whose keys the operator chooses
        "global", "nodeSelector", "affinity", "podAnnotations", "podLabels", "clientLabels", "labels", "endpoint",
        "requests", "limits", "tolerations", "extraEgress", "valueFrom", "initContainers",
    }  # fmt: skip

    def closed(schema: Any, name: str) -> None:
        for key, each in schema.get("properties", {}).items():
            if key not in anything and each.get("type") in ("object", "array"):
                closed(each.get("items", each), key)
        if schema.get("type") == "object":
            assert schema.get("additionalProperties") is False, name

    closed(SCHEMA, "values")
