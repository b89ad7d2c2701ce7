"""A client's ``ModelConfig`` on top of ``serving.yaml`` changes the fields that it names, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bf16kit.messages.errors import InvalidRequest
from service.models.override import ConfigOverride
from service.models.policy import Serving

YAML: dict[str, Any] = {
    "max_batch_size": 16,
    "max_queue_size": 7,
    "max_queue_ms": 50.0,
    "priority_levels": 3,
    "priority_queue_policy": {3: {"max_queue_size": 2}},
    "version_policy": "all",
    "formats": {"a": "NCHW"},
    "shadow": {"rate": 0.5},
    "budget": {"relative_l2": 0.5},
}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({}, {}),
        ({"max_batch_size": 0}, {"max_batch_size": 0}),
        ({"max_batch_size": None, "dynamicBatching": {}}, {}),
        ({"maxBatchSize": "4"}, {"max_batch_size": 4}),
        ({"version_policy": {"latest": {"num_versions": 2}}}, {"version_policy": {"latest": 2}}),
        ({"version_policy": {"latest": {}}}, {"version_policy": {"latest": 1}}),
        ({"version_policy": {"specific": {"versions": ["3", 1]}}}, {"version_policy": {"specific": [3, 1]}}),
        ({"dynamic_batching": {"maxQueueDelayMicroseconds": "1500"}}, {"max_queue_delay_ms": 1.5}),
        ({"dynamic_batching": {"priority_levels": 5}}, {"priority_levels": 5}),
        ({"dynamic_batching": {"default_priority_level": 2}}, {"default_priority_level": 2}),
        ({"dynamic_batching": {"default_queue_policy": {"max_queue_size": 9}}}, {"max_queue_size": 9}),
        ({"dynamic_batching": {"default_queue_policy": {"defaultTimeoutMicroseconds": 9000}}}, {"max_queue_ms": 9.0}),
        (
            {"dynamic_batching": {"priority_queue_policy": {"1": {"max_queue_size": 4}, "2": {}}}},
            {"priority_queue_policy": {1: {"max_queue_size": 4}, 2: {}}},
        ),
        ({"instance_group": [{"count": 3}]}, {"instances": 3}),
        ({"instance_group": [{"kind": "KIND_GPU"}]}, {"profile": "cuda"}),
        ({"parameters": {"profile": {"string_value": "cpu"}, "note": {"string_value": "told"}}}, {"profile": "cpu"}),
        ({"input": [{"name": "b", "format": "FORMAT_NHWC"}]}, {"formats": {"a": "NCHW", "b": "NHWC"}}),
        ({"name": "m", "backend": "onnxruntime", "ensemble_scheduling": None, "model_warmup": []}, {}),
    ],
)
def test_only_the_named_fields_change(config: dict[str, Any], changes: dict[str, Any]) -> None:
    changed = ConfigOverride("m", json.dumps(config)).change(Serving.model_validate(YAML))
    assert changed == Serving.model_validate({**YAML, **changes})


def test_a_client_that_sends_back_the_version_policy_keeps_it_strict() -> None:
    strict = Serving.model_validate({"version_policy": {"latest": 1, "strict": True}})
    for sent, kept in (({"latest": {"num_versions": 2}}, True), ({"all": {}}, False)):
        assert ConfigOverride("m", json.dumps({"version_policy": sent})).change(strict).version_policy.strict is kept


def test_removing_a_priority_level_that_serving_yaml_configures_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="priority level 3 is asked for, but priority_levels is 2"):
        ConfigOverride("m", '{"dynamic_batching": {"priority_levels": 2}}').change(Serving.model_validate(YAML))


def test_true_is_not_a_number() -> None:
    with pytest.raises(InvalidRequest, match="'max_batch_size' is 'True': expected a number"):
        ConfigOverride("m", '{"max_batch_size": true}')


@pytest.mark.parametrize(
    "field", ["optimization", "sequence_batching", "ensemble_scheduling", "model_warmup", "response_cache", "weights"]
)
def test_a_field_without_a_counterpart_is_rejected_by_name(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{field}' is not supported; the fields are version_policy"):
        ConfigOverride("m", json.dumps({field: {"enable": True}}))
