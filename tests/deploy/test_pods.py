"""What the pods are allowed, asked and given: the same in every way to deploy them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import LoopbackModel, serving
from manifests import BASE, OVERLAYS, Manifest, charted, containers, kustomized, needs_tools, one, plain, pods

pytestmark = [pytest.mark.manifests, needs_tools]
TO_SPARE = 5  # seconds, at least, from the end of the drain to SIGKILL
EVERYTHING = ("--set", "monitoring.enabled=true,autoscaling.enabled=true")


def deployments() -> dict[str, list[Manifest]]:
    """Every way to deploy the server."""
    kinds = {name: kustomized(OVERLAYS / name) for name in ("cpu", "gpu", "demo")}
    return {"base": kustomized(BASE), **kinds, "chart": charted(*EVERYTHING), "kserve": plain()}


WAYS = ("base", "cpu", "gpu", "demo", "chart", "kserve")
ONLY_KUBERNETES = WAYS[:-1]


def settings(manifests: list[Manifest]) -> dict[str, Any]:
    """What `server.yaml` of the ConfigMap says."""
    (found,) = [each["data"]["server.yaml"] for each in manifests if each["kind"] == "ConfigMap"]
    settings: dict[str, Any] = yaml.safe_load(found)
    return settings


def servers(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """The specification of each pod that serves, and its container that does."""
    for _, spec in pods(manifests):
        (server,) = [each for each in spec["containers"] if each["image"].startswith("bf16kit")]
        yield spec, server


@pytest.mark.parametrize("way", WAYS)
def test_a_container_may_do_nothing_that_it_need_not(way: str) -> None:
    manifests = deployments()[way]
    for _, spec in pods(manifests):
        whole = spec.get("securityContext", {})
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            allowed = {**whole, **container["securityContext"]}
            assert allowed["runAsNonRoot"] is True
            assert allowed["runAsUser"] >= 10_000
            assert allowed["runAsGroup"] >= 10_000  # where only the user is given, the group is root's
            assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
            assert allowed["readOnlyRootFilesystem"] is True
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "hostPort"} & container.keys()
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


@pytest.mark.parametrize("way", ONLY_KUBERNETES)
def test_nothing_of_the_cluster_gets_into_a_pod(way: str) -> None:
    """No token of its API, and no variables of its Services: BF16KIT_GRPC_PORT is a setting."""
    manifests = deployments()[way]
    assert one(manifests, "ServiceAccount")["automountServiceAccountToken"] is False
    for _, spec in pods(manifests):
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False


@pytest.mark.parametrize("way", WAYS)
def test_what_a_container_takes_is_bounded(way: str) -> None:
    for container in containers(deployments()[way]):
        asked, bound = container["resources"]["requests"], container["resources"]["limits"]
        assert asked["cpu"] == bound["cpu"]
        assert asked["memory"] == bound["memory"]
        assert bound["ephemeral-storage"]


@pytest.mark.parametrize("way", WAYS)
def test_no_variable_beats_what_the_settings_say(way: str) -> None:
    """The server divides its container's processors by its workers; BF16KIT_THREADS would give each of them all."""
    manifests = deployments()[way]
    written = settings(manifests) if way != "kserve" else {}
    for _, server in servers(manifests):
        named = {each["name"].removeprefix("BF16KIT_").lower() for each in server.get("env", ())}
        assert named & (written.keys() | {"threads"}) == set()


@pytest.mark.parametrize("way", WAYS)
def test_models_and_settings_are_read_only_and_tmp_can_be_written_within_bounds(way: str) -> None:
    for spec, server in servers(deployments()[way]):
        for mount in server["volumeMounts"]:
            if mount["mountPath"] == "/tmp":
                (scratch,) = [each for each in spec["volumes"] if each["name"] == mount["name"]]
                assert scratch["emptyDir"]["sizeLimit"]
            else:
                assert mount["readOnly"] is True, mount
        assert "/tmp" in [mount["mountPath"] for mount in server["volumeMounts"]]


@pytest.mark.parametrize("way", ONLY_KUBERNETES)
def test_sigkill_comes_after_the_drain(way: str) -> None:
    manifests = deployments()[way]
    config = settings(manifests)
    for spec, _ in servers(manifests):
        assert spec["terminationGracePeriodSeconds"] >= config["lame_duck_seconds"] + config["drain_seconds"] + TO_SPARE


def test_in_kserve_too_where_it_comes_after_30_seconds() -> None:
    (server,) = containers(plain())
    (lame,) = [float(each.split("=")[1]) for each in server["args"] if each.startswith("--lame-duck-seconds=")]
    (drain,) = [float(each["value"]) for each in server["env"] if each["name"] == "BF16KIT_DRAIN_SECONDS"]
    assert lame + drain + TO_SPARE <= 30


@pytest.mark.parametrize("way", WAYS)
def test_liveness_does_not_follow_the_models_and_readiness_does(way: str) -> None:
    """Asked of a real server, by the names that the probes have."""
    (probes,) = [
        {name: server[f"{name}Probe"]["grpc"]["service"] for name in ("startup", "liveness", "readiness")}
        for _, server in servers(deployments()[way])
    ]
    model = LoopbackModel("m", state="loading")
    with serving(model) as served:
        stub: Any = health_pb2_grpc.HealthStub(served.channel)

        def answers() -> dict[str, str]:
            asked = {name: health_pb2.HealthCheckRequest(service=service) for name, service in probes.items()}
            codes = {name: stub.Check(question, timeout=30).status for name, question in asked.items()}
            return {name: health_pb2.HealthCheckResponse.ServingStatus.Name(code) for name, code in codes.items()}

        assert answers() == {"startup": "SERVING", "liveness": "SERVING", "readiness": "NOT_SERVING"}
        served.registry.change(model, "unavailable")
        assert answers() == {"startup": "SERVING", "liveness": "SERVING", "readiness": "NOT_SERVING"}
        served.registry.change(model, "ready")
        assert set(answers().values()) == {"SERVING"}


@pytest.mark.parametrize("way", WAYS)
def test_probes_ask_the_port_that_is_listened_on_and_have_patience(way: str) -> None:
    for _, server in servers(deployments()[way]):
        ports = {port["containerPort"] for port in server["ports"]}
        for name in ("startup", "liveness", "readiness"):
            probe = server[f"{name}Probe"]
            assert probe["grpc"]["port"] in ports
            assert probe["timeoutSeconds"] <= probe["periodSeconds"]
        # A server at ten times its capacity answers health within a second, one whose worker is started again in two.
        assert server["livenessProbe"]["periodSeconds"] * server["livenessProbe"]["failureThreshold"] >= 60
        assert server["readinessProbe"]["failureThreshold"] >= 3


@pytest.mark.parametrize("way", ONLY_KUBERNETES)
def test_selectors_choose_these_pods_and_no_others(way: str) -> None:
    manifests = deployments()[way]
    template = one(manifests, "Deployment")["spec"]["template"]
    labels, mine = template["metadata"]["labels"], {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    chosen = [one(manifests, "Deployment")["spec"]["selector"]["matchLabels"]]
    chosen += [one(manifests, "Service", name)["spec"]["selector"] for name in ("bf16kit", "bf16kit-metrics")]
    chosen += [one(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    chosen += [one(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]]
    chosen += [spread["labelSelector"]["matchLabels"] for spread in template["spec"]["topologySpreadConstraints"]]
    assert len(chosen) == 7
    for selector in chosen:
        assert selector.keys() == mine
        assert selector.items() <= labels.items()


@pytest.mark.parametrize("way", ONLY_KUBERNETES)
def test_services_lead_to_the_ports_of_the_settings(way: str) -> None:
    manifests = deployments()[way]
    config = settings(manifests)
    ((_, server),) = servers(manifests)
    listening = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert listening == {"grpc": config["grpc_port"], "http": config["http_port"]}
    grpc, http = (one(manifests, "Service", name)["spec"] for name in ("bf16kit", "bf16kit-metrics"))
    assert grpc["clusterIP"] == "None"  # every pod's address: clients spread their calls
    assert "clusterIP" not in http
    assert [(port["targetPort"], port["port"]) for port in (*grpc["ports"], *http["ports"])] == list(listening.items())


@pytest.mark.parametrize("way", ONLY_KUBERNETES)
def test_who_may_reach_what(way: str) -> None:
    """Whole: an item too many opens a port, and kustomize would once have added labels of ours to the DNS's."""
    spec = one(deployments()[way], "NetworkPolicy")["spec"]
    client = {"matchLabels": {"bf16kit.io/client": "true"}}
    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    names = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
    }
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [
        {
            "ports": [{"protocol": "TCP", "port": "grpc"}],
            "from": [{"namespaceSelector": client}, {"podSelector": client}],
        },
        {"ports": [{"protocol": "TCP", "port": "http"}], "from": [{"namespaceSelector": monitoring}]},
    ]
    assert spec["egress"] == [
        {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}], "to": [names]}
    ]


def test_a_pod_of_the_gpu_overlay_has_one_gpu_and_fails_without() -> None:
    ((spec, server),) = servers(kustomized(OVERLAYS / "gpu"))
    assert server["resources"]["limits"]["nvidia.com/gpu"] == server["resources"]["requests"]["nvidia.com/gpu"] == "1"
    assert {"name": "BF16KIT_DEVICE", "value": "cuda:0"} in server["env"]
    assert spec["tolerations"]


def test_the_demo_converts_before_it_serves_and_needs_no_claim() -> None:
    manifests = kustomized(OVERLAYS / "demo")
    assert "PersistentVolumeClaim" not in {each["kind"] for each in manifests}
    ((spec, _),) = servers(manifests)
    (models,) = [volume for volume in spec["volumes"] if volume["name"] == "models"]
    assert models.keys() == {"name", "emptyDir"}
    (convert,) = spec["initContainers"]
    (mount,) = [each for each in convert["volumeMounts"] if each["name"] == "models"]
    assert convert["args"] == [mount["mountPath"]] == [settings(manifests)["repository"]]
    assert not mount.get("readOnly")
