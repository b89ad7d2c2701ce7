"""Permissions, resources and settings of the pods: the same in every way to deploy them."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import LoopbackModel, serving
from manifests import WAYS as CHARTED
from manifests import Manifest, charted, containers, needs_tools, one, plain, pods

pytestmark = [pytest.mark.manifests, needs_tools]
TO_SPARE = 5  # the least number of seconds from the end of the drain to SIGKILL
WAYS = (*CHARTED, "kserve")


def rendered(way: str) -> list[Manifest]:
    """Return the manifests of one way to deploy the server."""
    return plain() if way == "kserve" else charted(*CHARTED[way])


@pytest.fixture(params=WAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """Return the manifests of each way in turn."""
    return rendered(request.param)


@pytest.fixture(params=CHARTED)
def from_chart(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


def settings(manifests: list[Manifest]) -> dict[str, Any]:
    """Return the settings in `server.yaml` of the ConfigMap."""
    (found,) = [each["data"]["server.yaml"] for each in manifests if each["kind"] == "ConfigMap"]
    settings: dict[str, Any] = yaml.safe_load(found)
    return settings


def servers(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield the specification of each pod that runs a server, and its server container."""
    for _, spec in pods(manifests):
        (server,) = [each for each in spec["containers"] if each["image"].startswith("bf16kit")]
        yield spec, server


def test_a_container_has_no_permission_that_it_does_not_need(manifests: list[Manifest]) -> None:
    for _, spec in pods(manifests):
        whole = spec.get("securityContext", {})
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            allowed = {**whole, **container["securityContext"]}
            assert allowed["runAsNonRoot"] is True
            assert allowed["runAsUser"] >= 10_000
            assert allowed["runAsGroup"] >= 10_000  # if only the user is given, the group is root
            assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
            assert allowed["readOnlyRootFilesystem"] is True
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "hostPort"} & container.keys()
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


def test_a_pod_gets_neither_an_api_token_nor_service_variables(from_chart: list[Manifest]) -> None:
    """The variables of a Service could override settings: BF16KIT_GRPC_PORT is a setting."""
    assert one(from_chart, "ServiceAccount")["automountServiceAccountToken"] is False
    for _, spec in pods(from_chart):
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False


def test_a_containers_resources_are_limited(manifests: list[Manifest]) -> None:
    for container in containers(manifests):
        asked, bound = container["resources"]["requests"], container["resources"]["limits"]
        assert asked["cpu"] == bound["cpu"]
        assert asked["memory"] == bound["memory"]
        assert bound["ephemeral-storage"]


def test_no_environment_variable_overrides_the_settings_file(manifests: list[Manifest]) -> None:
    """The server divides its container's processors by its workers; BF16KIT_THREADS would give each worker all."""
    kinds = {each["kind"] for each in manifests}
    written = settings(manifests) if "ConfigMap" in kinds else {}
    for _, server in servers(manifests):
        named = {each["name"].removeprefix("BF16KIT_").lower() for each in server.get("env", ())}
        assert named & (written.keys() | {"threads"}) == set()


def test_only_tmp_is_writable_and_its_size_is_limited(manifests: list[Manifest]) -> None:
    for spec, server in servers(manifests):
        for mount in server["volumeMounts"]:
            if mount["mountPath"] == "/tmp":
                (scratch,) = [each for each in spec["volumes"] if each["name"] == mount["name"]]
                assert scratch["emptyDir"]["sizeLimit"]
            else:
                assert mount["readOnly"] is True, mount
        assert "/tmp" in [mount["mountPath"] for mount in server["volumeMounts"]]


def test_sigkill_comes_after_the_drain(from_chart: list[Manifest]) -> None:
    config = settings(from_chart)
    for spec, _ in servers(from_chart):
        assert spec["terminationGracePeriodSeconds"] >= config["lame_duck_seconds"] + config["drain_seconds"] + TO_SPARE


def test_the_drain_fits_into_kserves_30_seconds() -> None:
    (server,) = containers(plain())
    (lame,) = [float(each.split("=")[1]) for each in server["args"] if each.startswith("--lame-duck-seconds=")]
    (drain,) = [float(each["value"]) for each in server["env"] if each["name"] == "BF16KIT_DRAIN_SECONDS"]
    assert lame + drain + TO_SPARE <= 30


def test_readiness_depends_on_the_models_and_liveness_does_not(manifests: list[Manifest]) -> None:
    """The test sends health checks to a real server, with the service names of the probes."""
    (probes,) = [
        {name: server[f"{name}Probe"]["grpc"]["service"] for name in ("startup", "liveness", "readiness")}
        for _, server in servers(manifests)
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


def test_probes_use_a_port_of_the_container_and_tolerate_slow_responses(manifests: list[Manifest]) -> None:
    for _, server in servers(manifests):
        ports = {port["containerPort"] for port in server["ports"]}
        for name in ("startup", "liveness", "readiness"):
            probe = server[f"{name}Probe"]
            assert probe["grpc"]["port"] in ports
            assert probe["timeoutSeconds"] <= probe["periodSeconds"]
        # A server at ten times its capacity answers health checks within a second; while a worker restarts, within two.
        assert server["livenessProbe"]["periodSeconds"] * server["livenessProbe"]["failureThreshold"] >= 60
        assert server["readinessProbe"]["failureThreshold"] >= 3


def test_selectors_match_only_the_pods_of_this_instance(from_chart: list[Manifest]) -> None:
    template = one(from_chart, "Deployment")["spec"]["template"]
    labels, mine = template["metadata"]["labels"], {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    chosen = [one(from_chart, "Deployment")["spec"]["selector"]["matchLabels"]]
    chosen += [one(from_chart, "Service", name)["spec"]["selector"] for name in ("bf16kit", "bf16kit-metrics")]
    chosen += [one(from_chart, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    chosen += [one(from_chart, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]]
    chosen += [spread["labelSelector"]["matchLabels"] for spread in template["spec"]["topologySpreadConstraints"]]
    assert len(chosen) == 7
    for selector in chosen:
        assert selector.keys() == mine
        assert selector.items() <= labels.items()


def test_services_use_the_ports_of_the_settings(from_chart: list[Manifest]) -> None:
    config = settings(from_chart)
    ((_, server),) = servers(from_chart)
    listening = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert listening == {"grpc": config["grpc_port"], "http": config["http_port"]}
    grpc, http = (one(from_chart, "Service", name)["spec"] for name in ("bf16kit", "bf16kit-metrics"))
    assert grpc["clusterIP"] == "None"  # resolves to every pod's address, so that clients spread their calls
    assert "clusterIP" not in http
    assert [(port["targetPort"], port["port"]) for port in (*grpc["ports"], *http["ports"])] == list(listening.items())


def test_the_network_policy_allows_exactly_these_connections(from_chart: list[Manifest]) -> None:
    """The test compares the whole policy: one extra item opens a port."""
    spec = one(from_chart, "NetworkPolicy")["spec"]
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


def test_the_gpu_values_request_one_gpu_and_the_device_cuda_0() -> None:
    ((spec, server),) = servers(rendered("gpu"))
    assert server["resources"]["limits"]["nvidia.com/gpu"] == server["resources"]["requests"]["nvidia.com/gpu"] == "1"
    assert settings(rendered("gpu"))["device"] == "cuda:0"
    assert spec["tolerations"]


def test_the_demo_converts_before_it_serves_and_needs_no_volume_claim() -> None:
    manifests = rendered("demo")
    assert "PersistentVolumeClaim" not in {each["kind"] for each in manifests}
    ((spec, _),) = servers(manifests)
    (models,) = [volume for volume in spec["volumes"] if volume["name"] == "models"]
    assert models.keys() == {"name", "emptyDir"}
    (convert,) = spec["initContainers"]
    (mount,) = [each for each in convert["volumeMounts"] if each["name"] == "models"]
    assert convert["args"] == [mount["mountPath"]] == [settings(manifests)["repository"]]
    assert not mount.get("readOnly")
