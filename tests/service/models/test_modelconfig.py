"""A client's ``ModelConfig`` on top of ``serving.yaml`` changes two fields; all others must be as the model's."""

import json
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_mlp

from bf16kit.messages.errors import InvalidRequest
from bf16kit.service.models.modelconfig import with_config
from bf16kit.service.models.plan import DesiredModel, desired_model_of
from bf16kit.service.models.serving import Serving

YAML: dict[str, Any] = {"max_batch_size": 16, "max_queue_size": 7, "max_queue_ms": 50.0, "instances": 2}
VERSIONS = (1, 2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("repository") / "m"
    for version in VERSIONS:
        write_mlp(directory / str(version))
    return directory


def changed(model: Path, config: Any, **more: Any) -> DesiredModel:
    (model / "serving.yaml").write_text(json.dumps({**YAML, **more}))
    return with_config(desired_model_of(model), config if isinstance(config, str) else json.dumps(config))


@pytest.mark.parametrize(
    ("config", "changes", "versions"),
    [
        ({}, {}, [3]),
        ({"max_batch_size": 0}, {"max_batch_size": 0}, [3]),
        ({"max_batch_size": None, "dynamicBatching": {}}, {}, [3]),
        ({"maxBatchSize": "4"}, {"max_batch_size": 4}, [3]),
        ({"version_policy": {"latest": {"num_versions": 2}}}, {"version_policy": {"latest": 2}}, [2, 3]),
        ({"versionPolicy": {"latest": {}, "all": None}}, {"version_policy": {"latest": 1}}, [3]),
        ({"version_policy": {"specific": {"versions": ["3", 1]}}}, {"version_policy": {"specific": [3, 1]}}, [1, 3]),
        ({"version_policy": {"all": {}}}, {"version_policy": "all"}, [1, 2, 3]),
        ({"name": "m", "backend": "onnxruntime", "ensemble_scheduling": None, "model_warmup": []}, {}, [3]),
        ({"dynamic_batching": {"default_queue_policy": {"maxQueueSize": 7, "timeout_action": "REJECT"}}}, {}, [3]),
        ({"instance_group": [{"count": "2", "kind": "KIND_CPU", "name": "m_0"}]}, {}, [3]),
        ({"parameters": {"profile": {"string_value": "cpu"}, "note": {"string_value": "told"}}}, {}, [3]),
        ({"input": [{"name": "x", "dataType": "TYPE_FP32", "dims": ["16"]}]}, {}, [3]),
        ({"output": [{"name": "y", "dims": [-1, 16]}]}, {}, [3]),
    ],
)
def test_two_fields_change_and_the_models_own_may_be_sent_back(
    model: Path, config: dict[str, Any], changes: dict[str, Any], versions: list[int]
) -> None:
    found = changed(model, config)
    assert [plan.version for plan in found.plans] == versions
    assert all(plan.serving == Serving.model_validate({**YAML, **changes}) for plan in found.plans)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("max_batch_size: 3", "is not JSON"),
        ("[" * 60_000, "is not JSON"),
        ("[]", "expected a JSON object"),
        ({"max_batch_size": -1}, "'max_batch_size' is -1"),
        ({"version_policy": {"specific": {"versions": [0]}}}, "'version_policy.specific.0' is 0"),
        ({"version_policy": {"specific": {"versions": [7]}}}, "asks for version 7; the versions are [1, 2, 3]"),
        ({"version_policy": {"latest": {}, "all": {}}}, "'version_policy' is"),
        ({"version_policy": "all"}, 'give one of {"all": {}}'),
        ({"name": "other"}, "'name' is 'other', the model has 'm'"),
        ({"dynamic_batching": {"preferred_batch_size": [4]}}, "'dynamic_batching.preferred_batch_size' is not supp"),
        ({"dynamic_batching": {"max_queue_delay_microseconds": 10**400}}, "'dynamic_batching.max_queue_delay_micro"),
        ({"dynamic_batching": {"default_queue_policy": {"timeout_action": "DELAY"}}}, "timeout_action' is 'DELAY'"),
        ({"instance_group": [{"count": 3}]}, "'instance_group.0.count' is '3', the model has '2'"),
        ({"instance_group": 2}, "'instance_group' is not supported"),
        ({"input": [{"name": "z"}]}, "'input.0.name' is 'z', the model has 'x'"),
        ({"input": [{"name": "x", "dataType": "TYPE_INT8"}]}, "is 'TYPE_INT8', the model has 'TYPE_FP32'"),
        ({"input": [{"name": "x", "reshape": {"shape": [4]}}]}, "'input.0.reshape.shape' is not supported"),
        ({"output": [{"name": "y", "dims": [17]}]}, "'output.0.dims' is '17', the model has '16'"),
    ],
)
def test_what_differs_is_rejected_with_its_name_and_the_remedy(model: Path, config: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        changed(model, config)
    text = str(refused.value)
    assert words in text
    assert len(text) < 1000
    if "the model has" in text or "not supported" in text:
        assert text.endswith("a load can change version_policy and max_batch_size; set everything else in serving.yaml")


def test_a_client_that_sends_back_the_version_policy_keeps_it_strict(model: Path) -> None:
    strict = {"version_policy": {"latest": 1, "strict": True}}
    for sent, kept in (({"latest": {"num_versions": 2}}, True), ({"all": {}}, False)):
        found = changed(model, {"version_policy": sent}, **strict)
        assert found.plans[0].serving.version_policy.strict is kept


def test_a_model_whose_serving_yaml_is_broken_is_rejected(model: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"'m' cannot be served with this config.*: .*unknown key 'max_batch'"):
        changed(model, {}, max_batch=3)
