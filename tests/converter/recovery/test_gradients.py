"""Counting gradients that vanish, are subnormal or overflow in a format, on values for which the counts are known."""

from __future__ import annotations

import pytest
import torch

from converter.recovery.gradients import GradientCounts, count_gradients

# fp16 holds 2^-24 and above, its normal numbers begin at 2^-14; bf16 holds 2^-133 and above.
_VALUES = torch.tensor([0.0, 1.0, 2.0**-14, 2.0**-15, 2.0**-24, 2.0**-26, 1e5, 2.0**-130, float("inf"), float("nan")])


def _counted(scale: float) -> dict[str, tuple[int, int, int, int]]:
    found = GradientCounts(3, [scale])
    found.add("weights", _VALUES)
    return {
        entry.format: (entry.values, entry.vanished, entry.subnormal, entry.overflowed) for entry in found.entries()
    }


def test_each_value_is_counted_by_what_it_becomes_in_the_format() -> None:
    """Zeros, and values that are not finite in fp32, are not counted, because a format cannot lose them."""
    assert _counted(1.0) == {"fp16": (7, 2, 2, 1), "bf16": (7, 0, 1, 0)}


def test_a_scale_saves_small_values_and_overflows_large_ones() -> None:
    assert _counted(2.0**16) == {"fp16": (7, 1, 0, 2), "bf16": (7, 0, 0, 0)}


def test_a_survey_covers_gradients_of_weights_and_of_layer_outputs() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    weights = list(module.parameters())
    entries = count_gradients(0, 8.0, module, weights, lambda: module(x).square().sum())
    assert {(entry.of, entry.format, entry.scale) for entry in entries} == {
        (of, name, scale) for of in ("weights", "activations") for name in ("fp16", "bf16") for scale in (1.0, 8.0)
    }
    gradients = torch.autograd.grad(module(x).square().sum(), weights)
    seen = next(entry for entry in entries if entry.of == "weights")
    assert seen.values == sum(int(gradient.count_nonzero()) for gradient in gradients)
    layers = next(entry for entry in entries if entry.of == "activations")
    assert layers.values > 5 * 2  # the last layer alone has so many
    assert all(weight.grad is None for weight in weights)
    assert not any(part._forward_hooks for part in module.modules())


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_no_combination_is_counted_twice(scale: float) -> None:
    module = torch.nn.Linear(3, 4)
    entries = count_gradients(0, scale, module, [module.weight], lambda: module(torch.ones(1, 3)).sum())
    assert len(entries) == (4 if scale == 1.0 else 8)
