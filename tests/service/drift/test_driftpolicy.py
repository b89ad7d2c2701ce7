"""The parts of serving.yaml about live drift: test_policy.py of the models has their defaults and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from bf16kit.messages.errors import ConfigError
from service.drift.driftpolicy import REMOVED_KEYS, FallbackPolicy, ShadowPolicy
from service.models.serving import load_serving


@pytest.mark.parametrize("policy", [ShadowPolicy(rate=0.5, max_rows=2), FallbackPolicy(clean_samples=7)])
def test_a_policy_survives_being_sent_to_another_process(policy: ShadowPolicy | FallbackPolicy) -> None:
    assert type(policy).model_validate(policy.model_dump(mode="json")) == policy


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_a_former_key_is_an_error_that_says_what_to_do(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    (tmp_path / "serving.yaml").write_text(f"{section}: {{{name}: 5}}\n", "utf-8")
    with pytest.raises(ConfigError, match=rf"'{section}\.{name}' is not a setting any more: .*delete it"):
        load_serving(tmp_path)
