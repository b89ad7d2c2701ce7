"""Comparing fusions with what they replace shows faults that cost less than the budget, wherever they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import attending
import numpy as np
import pytest
from attending import Spelling
from layers import Array, batch, layer
from lowered import Lowered, lower
from normed import Rms, feeds, residual, rms
from onnx import ModelProto

import graphs
from bf16kit.converter.fuse.attention import Attention, SelectionMask
from bf16kit.converter.fuse.check import excess_of, faults
from bf16kit.converter.fuse.multiply import Epilogue, epilogue
from bf16kit.converter.fuse.products import Product
from bf16kit.converter.plan.profiles import PROFILES
from bf16kit.converter.write.graphs import write_unfused_and_fused

Patch = pytest.MonkeyPatch
Feeds = Mapping[str, Array]


def check(made: Lowered, fed: Feeds, profile: str = "cpu") -> dict[str, str]:
    paths = write_unfused_and_fused(made.prepared, made.planned, made.stored, PROFILES[profile], made.artifact.path)
    return faults(*paths, made.planned.fusions.made, made.inputs, [dict(fed)])


WHERE = Spelling(mask="where")
MODELS: dict[str, tuple[ModelProto, Feeds]] = {
    "attention": (attending.attention(Spelling()), attending.feeds(Spelling())),
    "attention, selected": (attending.attention(WHERE), attending.feeds(WHERE)),
    "attention, all shown": (
        attending.attention(WHERE),
        attending.feeds(WHERE) | {"mask": np.ones_like(attending.feeds(WHERE)["mask"])},
    ),
    "layer norm": (residual(summed=True), feeds()),
    "rms norm": (rms(Rms(others=True)), feeds()),
    "gelu": (layer(64, "panels", bias=True, activation="gelu"), batch()),
    "gelu_tanh": (layer(50, "transposed", bias=True, activation="gelu_tanh"), batch()),
    "mlp": (graphs.mlp((32, 64, 64, 32)), {"x": graphs.values(4, 32, seed=9)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_sound_fusions_pass(name: str, tmp_path: Path) -> None:
    proto, fed = MODELS[name]
    made = lower(tmp_path / "m" / "1", proto)
    assert made.planned.fusions.made
    assert check(made, fed) == {}


def _changed(function: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Return what makes the ``function`` of bf16kit.converter.fuse return its result changed."""

    def mutate(patch: Patch) -> None:
        path, _, name = f"bf16kit.converter.fuse.{function}".rpartition(".")
        real = getattr(import_module(path), name)

        def wrong(*given: Any) -> Any:
            found = real(*given)
            return None if found is None else change(found)

        patch.setattr(f"{path}.{name}", wrong)

    return mutate


def _number_of_minus_five(found: Attention) -> Attention:
    masks = (replace(mask, number=-5.0) if isinstance(mask, SelectionMask) else mask for mask in found.masks)
    return replace(found, masks=tuple(masks))


_OTHER_GELU = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}
_minus_five = _changed("attend.attention", _number_of_minus_five)
_scale = _changed("attend.attributes", lambda sizes: sizes | {"scale": sizes["scale"] * 1.01})
_rms_epsilon = _changed("norms.norm", lambda found: replace(found, epsilon=found.epsilon + 1e-4))
_epsilon = _changed("norms.norm", lambda found: replace(found, epsilon=found.epsilon + 1e-3))
_gelu = _changed("multiply.epilogue", lambda found: replace(found, activation=_OTHER_GELU[found.activation]))
_no_bias = _changed("multiply.epilogue", lambda found: replace(found, bias=None))
# The widths of heads agree, so it runs whenever there are as many queries as keys.
_keys = _changed("attend.attention", lambda found: replace(found, q=replace(found.q, value=found.k.value)))
_heads = _changed("attend.attributes", lambda sizes: sizes | {"heads": 5, "heads_of_q": [0, 0, 5, 8]})
MUTANTS: dict[str, tuple[Callable[[Patch], None], str, str]] = {
    "mask of -5": (_minus_five, "attention, selected", "cpu"),
    "mask of -5, samples that hide nothing": (_minus_five, "attention, all shown", "cpu"),
    "scale off by 1 %": (_scale, "attention", "cpu"),
    "scale off by 1 %, rounding": (_scale, "attention", "cpu-bf16"),
    "rms epsilon off by 1e-4": (_rms_epsilon, "rms norm", "cpu"),
    "norm epsilon off by 1e-3": (_epsilon, "layer norm", "cpu"),
    "tanh for erf": (_gelu, "gelu", "cpu"),
    "erf for tanh": (_gelu, "gelu_tanh", "cpu"),
    "bias lost": (_no_bias, "mlp", "cpu"),
    "keys as queries": (_keys, "attention", "cpu"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fusion_that_computes_something_else_is_refused(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    mutate, model, profile = MUTANTS[name]
    mutate(monkeypatch)
    proto, fed = MODELS[model]
    made = lower(tmp_path / "m" / "1", proto, profiles=[profile])
    found = check(made, fed, profile)
    wrong = {fusion.anchor for fusion in made.planned.fusions.made if name != "bias lost" or len(fusion.nodes) > 1}
    assert found.keys() == wrong


def test_only_the_wrong_one_of_several_fusions_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    """Those after it read wrong values in the fused graph, but are compared on right ones."""
    real = epilogue

    def wrong(product: Product) -> Epilogue:
        found = real(product)
        return replace(found, activation="none") if product.node.name == "matmul0" else found

    monkeypatch.setattr("bf16kit.converter.fuse.multiply.epilogue", wrong)
    proto, fed = MODELS["mlp"]
    found = check(lower(tmp_path / "m" / "1", proto), fed)
    assert found.keys() == {"matmul0"}
    assert "times the fp32 noise allowed" in found["matmul0"]


def test_a_fusion_that_does_not_run_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    proto, fed = MODELS["attention"]
    made = lower(tmp_path / "m" / "1", proto)
    _heads(monkeypatch)
    assert check(made, fed).keys() == {fusion.anchor for fusion in made.planned.fusions.made}


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_wrong_slice_is_seen_beside_large_values(axis: int) -> None:
    right = graphs.values(4, 6, 8) + 1
    index = [slice(None)] * 3
    index[axis] = slice(1, 2)
    right[tuple(index)] *= 1e9
    wrong = right.copy()
    index[axis] = slice(2, 3)
    wrong[tuple(index)] *= np.float32(1.001)
    assert excess_of(right, right * np.float32(1 + 1e-7)) < 0.1
    assert excess_of(right, wrong) > 10


@pytest.mark.parametrize(
    ("reference", "candidate", "equal"),
    [
        ([5.0], [5.0], True),
        ([5.0], [5.001], False),
        ([1, -np.inf], [1, -np.inf], True),
        ([1, -np.inf], [1, 100], False),
        ([1, -np.inf], [1, np.inf], False),
        ([1, 2], [1, np.nan], False),
        ([1, 2], [1, np.inf], False),
        ([0, 0, 0], [0, 0, 0, 0], False),
        ([1, np.nan], [1, 2], True),
        ([1, np.nan], [7, np.nan], False),
        ([0, 0], [0, 0], True),
        ([0, 0], [0, 1e-3], False),
        ([3.4e38, 3.4e38], [3.4e38, 3.4e38], True),
        ([[], []], [[], []], True),  # an expert that no token chose
        ([[], []], [[1], [1]], False),
    ],
)
def test_infinities_must_be_equal_and_nan_is_not_judged(
    reference: Sequence[float | Sequence[float]], candidate: Sequence[float | Sequence[float]], equal: bool
) -> None:
    assert (excess_of(np.array(reference, np.float32), np.array(candidate, np.float32)) <= 1) == equal
