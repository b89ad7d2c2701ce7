"""What the Helm chart renders for some values. ``test_chart_values.py`` tests that each value has an effect."""

import pytest
import yaml
from manifests import CHART, charted, named, needs_tools, one, pods

from bf16kit import __version__

pytestmark = [pytest.mark.manifests, needs_tools]


def test_changed_settings_cause_a_rollout() -> None:
    """The pod template changes with the settings; a change of the ConfigMap alone restarts no pod."""
    noted = [
        one(charted(*flags), "Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for flags in ((), (), ("--set", "config.max_in_flight=64"))
    ]
    assert noted[0] == noted[1] != noted[2]


def test_two_releases_in_one_namespace_do_not_interfere() -> None:
    mine, other = charted(), charted(release="other")
    assert {named(each) for each in mine} & {named(each) for each in other} == set()
    labels = one(other, "Deployment", "other-bf16kit")["spec"]["template"]["metadata"]["labels"]
    for each in mine:
        for selector in (each.get("spec", {}).get("selector", {}), each.get("spec", {}).get("podSelector", {})):
            chosen = selector.get("matchLabels", selector)
            assert not chosen or not chosen.items() <= labels.items(), named(each)


def test_an_existing_volume_claim_is_used_and_none_is_created() -> None:
    manifests = charted("--set", "models.existingClaim=mine")
    assert "PersistentVolumeClaim" not in {each["kind"] for each in manifests}
    ((_, spec),) = pods(manifests)
    assert {"claimName": "mine", "readOnly": True} in [
        volume.get("persistentVolumeClaim") for volume in spec["volumes"]
    ]


@pytest.mark.parametrize("tls", [False, True])
def test_with_tls_probes_use_https_because_kubelets_grpc_probes_have_no_tls(tls: bool) -> None:
    """They would restart the pod forever."""
    flags = (
        "existingSecret=mine,config.tls_certificate=/etc/bf16kit-secret/tls.crt,config.tls_key=/etc/bf16kit-secret/k"
    )
    ((_, spec),) = pods(charted("--set", flags if tls else "config.token_file=/t"))
    (server,) = spec["containers"]
    probes = {name: server[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    if not tls:
        assert all("grpc" in probe and "httpGet" not in probe for probe in probes.values())
        return
    assert {name: probe["httpGet"] for name, probe in probes.items()} == {
        name: {"path": path, "port": 8002, "scheme": "HTTPS"}
        for name, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz"))
    }
    assert not any("grpc" in probe for probe in probes.values())
    assert {"name": "secret", "mountPath": "/etc/bf16kit-secret", "readOnly": True} in server["volumeMounts"]


def test_with_tls_metrics_are_scraped_over_https_with_the_given_credentials() -> None:
    everything = "monitoring.enabled=true,config.tls_certificate=/c,config.tls_key=/k"
    token = 'monitoring.endpoint={"authorization": {"credentials": {"name": "mine", "key": "token"}}}'
    (endpoint,) = one(charted("--set", everything, "--set-json", token), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["authorization"] == {"credentials": {"name": "mine", "key": "token"}}


def test_the_charts_version_is_the_programs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__
