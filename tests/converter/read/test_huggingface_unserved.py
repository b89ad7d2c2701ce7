"""Outputs that a model gives because of its config, and that an artifact does not serve."""

from __future__ import annotations

from typing import Any

import hfzoo
import pytest

from bf16kit.numerics.tensors import TensorSpec
from converter.process.quiet import quiet
from converter.read.huggingface.unserved import BasicOutputModule
from converter.read.torch.onnx_export import adapt

IDS = (TensorSpec("input_ids", "int64", ("batch", "seq")),)


def module(name: str, **config: Any) -> Any:
    import transformers

    architecture, configured, fields, _ = hfzoo.MODELS[name]
    with quiet():
        fields = fields | config | {"attn_implementation": "eager"}
        return getattr(transformers, architecture)(getattr(transformers, configured)(**fields)).eval()


@pytest.mark.parametrize(
    ("name", "config", "left_out"),
    [
        ("bert", {}, set()),  # its config sets use_cache, but it has no cache
        ("bert", {"output_hidden_states": True}, {"hidden_states"}),
        ("bert", {"output_attentions": True}, {"attentions"}),
        ("gpt2", {}, {"past_key_values"}),
        ("gpt2", {"use_cache": False}, set()),
        ("llama", {"output_hidden_states": True}, {"past_key_values", "hidden_states"}),
    ],
)
def test_outputs_that_the_config_requests_are_named_and_not_computed(
    name: str, config: dict[str, Any], left_out: set[str]
) -> None:
    plain = BasicOutputModule.of(module(name, **config))
    model = adapt(plain.module, IDS)
    assert not model.left_out
    assert set(plain.left_out(model)) == left_out
    assert not adapt(plain.module, IDS).left_out, "it was to be switched off again"


def test_a_model_that_fails_with_the_outputs_of_its_config_is_served_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = BasicOutputModule.of(module("gpt2"))
    model = adapt(plain.module, IDS)

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no cache today")

    monkeypatch.setattr(plain.module, "forward", failing)
    assert plain.left_out(model) == ("what use_cache in its config adds",)
    monkeypatch.undo()
    assert not adapt(plain.module, IDS).left_out
