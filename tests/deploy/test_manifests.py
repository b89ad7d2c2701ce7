"""Every manifest is valid for the cluster's API, and the check finds manifests that are not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from manifests import (
    DEPLOY,
    EVERYTHING,
    WAYS,
    Refused,
    charted,
    check,
    linted,
    named,
    needs_schemas,
    needs_tools,
    one,
    plain,
)

pytestmark = pytest.mark.manifests
SECRET = "/etc/bf16kit-secret"
GUARDED = f"existingSecret=bf16kit,config.tls_certificate={SECRET}/tls.crt,config.tls_key={SECRET}/tls.key"
SCRAPED = """monitoring.endpoint={
 "tlsConfig": {"ca": {"secret": {"name": "s", "key": "ca.crt"}}, "serverName": "bf16kit"},
 "authorization": {"credentials": {"name": "s", "key": "token"}}}"""
RENDERED = {**WAYS, "chart, TLS": ("--set", GUARDED, *EVERYTHING, "--set-json", SCRAPED)}


@pytest.mark.parametrize("rendered", RENDERED)
@needs_tools
@needs_schemas
def test_rendered_manifests_are_valid(rendered: str) -> None:
    manifests = charted(*RENDERED[rendered])
    assert len({named(each) for each in manifests}) == len(manifests) > 5
    assert "Secret" not in {each["kind"] for each in manifests}
    for manifest in manifests:
        check(manifest)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/name"] == "bf16kit", named(manifest)


@needs_schemas
def test_manifests_that_are_applied_unrendered_are_valid() -> None:
    manifests = plain()
    assert {each["kind"] for each in manifests} == {"ClusterServingRuntime", "InferenceService"}
    for manifest in manifests:
        check(manifest)


def _server(deployment: Any) -> Any:
    return deployment["spec"]["template"]["spec"]["containers"][0]


def _misspell(place: Any, right: str, wrong: str) -> None:
    place[wrong] = place.pop(right)


PLANTED: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "a misspelt probe": ("Deployment", lambda m: _misspell(_server(m), "readinessProbe", "readinesProbe"), "readines"),
    "a rule's expression, misspelt": (
        "PrometheusRule", lambda m: _misspell(m["spec"]["groups"][0]["rules"][0], "expr", "expression"), "expr",
    ),
    "a rule's time in words": (
        "PrometheusRule", lambda m: m["spec"]["groups"][0]["rules"][0].update({"for": "1 minute"}), "1 minute",
    ),
    "an endpoint's port, misspelt": (
        "ServiceMonitor", lambda m: _misspell(m["spec"]["endpoints"][0], "port", "targetport"), "targetport",
    ),
    "a runtime's container": (
        "ClusterServingRuntime", lambda m: _misspell(m["spec"]["containers"][0], "args", "arg"), "arg",
    ),
    "a runtime's protocol": ("ClusterServingRuntime", lambda m: m["spec"].update(protocolVersions=["v3"]), "v3"),
    "a model's storage": (
        "InferenceService",
        lambda m: _misspell(m["spec"]["predictor"]["model"], "storageUri", "storageURI"), "storageURI",
    ),
    "a version that is gone": ("PodDisruptionBudget", lambda m: m.update(apiVersion="policy/v1beta1"), "no such kind"),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
@needs_tools
@needs_schemas
def test_a_planted_error_is_found(planted: str) -> None:
    kind, plant, told = PLANTED[planted]
    manifests = copy.deepcopy([*charted(*EVERYTHING), *plain()])
    manifest = next(each for each in manifests if each["kind"] == kind)
    check(manifest)
    plant(manifest)
    with pytest.raises(Refused, match=told):
        check(manifest)


@needs_tools
def test_helm_lint_accepts_the_chart() -> None:
    assert "0 chart(s) failed" in linted()
    assert "0 chart(s) failed" in linted(*EVERYTHING)


@needs_tools
def test_the_chart_passes_the_rules_of_prometheus_on_unchanged() -> None:
    """They are one copy: the chart has a link to them. Helm could interpret the braces in them."""
    files = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
    groups = [group for path in files for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    assert one(charted(*EVERYTHING), "PrometheusRule")["spec"]["groups"] == groups
    assert any("{{ $labels.model }}" in str(rule) for group in groups for rule in group["rules"])
