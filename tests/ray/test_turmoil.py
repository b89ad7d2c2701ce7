"""Nodes die and are added, and models are replaced, while clients keep sending requests."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from artifacts import write_mlp
from grpc import StatusCode
from raycluster import NODE, PATIENCE, RepeatedCalls, Served, fronts, of_node, replicas
from waiting import until

from bf16kit.protocol import inference_pb2 as pb

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # warnings of Ray and its libraries


def _versions(volley: RepeatedCalls) -> set[str]:
    return {pb.ModelInferResponse.FromString(answer).model_version for answer in volley.answers}


def test_a_new_version_replaces_the_old_one_without_a_failed_call(served: Served, repository: Path) -> None:
    with RepeatedCalls(served.infer) as volley:
        until(lambda: volley.calls > 20, PATIENCE, "calls")
        write_mlp(repository / "mlp" / "2")
        served.deployed.deploy_changes()
        until(lambda: "2" in _versions(volley), PATIENCE, "an answer of the new version")
        until(lambda: served.states()["bf16kit.mlp"] == "RUNNING", PATIENCE, "the end of the deployment")
    assert set(volley.codes) == {"OK"}, volley.errors
    assert _versions(volley) == {"1", "2"}


def test_a_damaged_version_does_not_replace_the_serving_one(served: Served, repository: Path) -> None:
    """The existing replicas keep serving, and Ray reports that the deployment has failed."""
    write_mlp(repository / "mlp" / "3")
    weights = repository / "mlp" / "3" / "weights.bf16"
    weights.write_bytes(bytes(weights.stat().st_size))
    with RepeatedCalls(served.infer) as volley:
        served.deployed.deploy_changes()
        until(lambda: served.states()["bf16kit.mlp"] != "RUNNING", PATIENCE, "the deployment to begin")
        until(lambda: served.states()["bf16kit.mlp"] in ("DEPLOY_FAILED", "UNHEALTHY"), PATIENCE, "its failure")
    assert set(volley.codes) == {"OK"}, volley.errors
    assert _versions(volley) == {"2"}

    def reason() -> str:
        _, index = served.ask("RepositoryIndex", b"")
        assert isinstance(index, bytes)
        models = pb.RepositoryIndexResponse.FromString(index).models
        return next((each.reason for each in models if each.name == "mlp" and each.state == "UNAVAILABLE"), "")

    until(lambda: "sha256" in reason(), PATIENCE, "the reason, also once its last replica has been given up")
    shutil.rmtree(repository / "mlp" / "3")
    served.deployed.deploy_changes()
    until(served.all_running, PATIENCE, "all applications running again")


def test_every_request_succeeds_on_retry_when_a_node_dies_under_load(served: Served) -> None:
    """The applications recover once there is a node for the replicas of the dead one."""
    until(served.all_running, PATIENCE, "all applications running")
    second = next(iter(served.cluster.worker_nodes))

    def there() -> list[str]:
        return [each for each in ("mlp", "slow") if replicas(each, of_node(second))]

    until(there, PATIENCE, "a replica on the second node: the first has no room for all")
    model = there()[0]
    # Ray answers for a front that is gone: INTERNAL, with a text of its own.
    rays = {StatusCode.INTERNAL} if fronts(of_node(second)) else set[StatusCode]()
    with RepeatedCalls(lambda: served.infer(model)) as volley, ThreadPoolExecutor(4) as pool:
        until(lambda: volley.calls > 10, PATIENCE, "calls")
        inside = [pool.submit(served.infer, "slow") for _ in range(4)]  # each waits three seconds in its replica
        until(lambda: served.metric("bf16kit_queue_depth", model="slow") > 0, PATIENCE, "requests inside of replicas")
        served.cluster.remove_node(second, allow_graceful=False)
        until(lambda: not served.all_running(), PATIENCE, "Ray to notice")
        before = volley.calls
        until(lambda: volley.calls > before + 10, PATIENCE, "calls to the node that is left")
        served.cluster.add_node(**NODE)
        until(served.all_running, PATIENCE, "all applications running again")
    cut_off = [told.result() for told in inside if told.result()[0] is not StatusCode.OK]
    assert {code for code, _ in cut_off} <= {StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED} | rays
    assert rays or not any("Traceback" in str(words) or "ray" in str(words) for _, words in cut_off)
    full = {"RESOURCE_EXHAUSTED"} if model == "slow" else set()  # two of its requests may wait, and more are sent here
    assert set(volley.codes) <= {"OK", "UNAVAILABLE"} | full | {code.name for code in rays}, volley.errors
    assert not volley.unanswered
    assert rays or "Traceback" not in "".join(volley.errors)
