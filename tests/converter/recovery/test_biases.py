"""Biases are corrected for the average error that rounding adds to the outputs of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lessonplans
import recovering
import torch
from architectures import Cnn, Mlp, Several, seeded
from torch import nn

from converter.recovery.biases import correct_biases
from converter.recovery.validation import State, ValidationLoss, as_published
from converter.recovery.weights import TrainedParameter


def _random(*shape: int, seed: int = 0, level: float = 0.0) -> torch.Tensor:
    return level + torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _prepared(
    module: nn.Module, batches: Sequence[Sequence[torch.Tensor]], names: Sequence[str] = ("y",), **more: Any
) -> tuple[ValidationLoss, dict[str, torch.Tensor]]:
    teacher, held = lessonplans.teacher(module, names, rank=batches[0][0].ndim), lessonplans.trained(module)
    return lessonplans.yardstick(teacher, batches, held, **more), lessonplans.state(teacher, held)


def _answers(yardstick: ValidationLoss, state: State | None, lesson: int = 0) -> torch.Tensor:
    """Return the last output of a lesson: with ``state`` as published, or of the fp32 model if it is None."""
    if state is None:
        return list(yardstick.batches[lesson].reference.values())[-1]
    with torch.no_grad():
        return list(yardstick.outputs(as_published(yardstick.trained, state), yardstick.batches[lesson]).values())[-1]


def test_for_inputs_far_from_zero_nearly_all_rounding_error_is_corrected() -> None:
    """The inputs' level times the rounding error of a row of weights is one number per channel, as a bias is."""
    batches = [(torch.from_numpy(feeds["x"]),) for feeds in recovering.unlabelled()]
    yardstick, before = _prepared(recovering.shifted(), batches)
    after, count = correct_biases(yardstick, before)
    assert count == 2
    assert yardstick.loss(after) < yardstick.loss(before) / 50
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "inner.up.bias", "inner.down.bias"
    }  # fmt: skip


def test_the_mean_of_every_channel_equals_that_of_fp32() -> None:
    yardstick, before = _prepared(seeded(Mlp()), [(_random(64, 16, level=3),)])
    after, _ = correct_biases(yardstick, before)
    wanted = _answers(yardstick, None).mean(0)
    assert not torch.allclose(_answers(yardstick, before).mean(0), wanted, atol=1e-4)
    assert torch.allclose(_answers(yardstick, after).mean(0), wanted, atol=1e-6)


def test_several_batches_have_equal_weight() -> None:
    """The correction fits the mean over all batches, not the last batch."""
    module = nn.Sequential(nn.Linear(16, 8))
    batches = [(_random(64, 16, seed=seed, level=seed * 5.0),) for seed in range(3)]
    yardstick, before = _prepared(module, batches)
    after, _ = correct_biases(yardstick, before)
    missing = [_answers(yardstick, None, at) - _answers(yardstick, after, at) for at in range(3)]
    assert float(torch.cat(missing).mean(0).abs().max()) < 1e-5
    assert float(missing[2].mean(0).abs().max()) > 1e-3


def test_convolutions_and_batchnorm_are_corrected_per_channel() -> None:
    """The first convolution has no bias. The second has one, before a BatchNorm that is corrected as well."""
    module = seeded(Cnn())
    module.get_buffer("features.1.running_mean").add_(1.0)
    yardstick, before = _prepared(module, [(_random(16, 3, 16, 16, level=2),)])
    after, count = correct_biases(yardstick, before)
    assert count == 4
    seen: dict[str, torch.Tensor] = {}
    layers = [("inner.features.1", 1), ("inner.features.3", 1), ("inner.features.4", 1), ("inner.head", -1)]
    found = []
    for weights in (None, after):
        for name, axis in layers:
            part = yardstick.teacher.model.module.get_submodule(name)
            handle = part.register_forward_hook(
                lambda _part, _given, out, name=name, axis=axis: seen.update(
                    {name: out.movedim(axis, -1).flatten(0, -2)}
                )
            )
            lesson = yardstick.batches[0]
            held = {} if weights is None else as_published(yardstick.trained, weights)
            with torch.no_grad():
                yardstick.outputs(held, lesson)
            handle.remove()
        found.append({name: value.mean(0) for name, value in seen.items()})
    for name, _ in layers:
        assert torch.allclose(found[0][name], found[1][name], atol=1e-5), name


def test_a_layer_that_runs_twice_is_corrected_by_the_mean_of_both_runs() -> None:
    module = seeded(Several())
    batch = (_random(32, 16, level=20), _random(32, 8, level=20))
    yardstick, before = _prepared(module, [batch], ("scores", "embedding"))
    after, count = correct_biases(yardstick, before)
    assert count == 2
    assert yardstick.loss(after) < yardstick.loss(before) / 10


def test_biases_that_are_rounded_are_not_corrected() -> None:
    module = seeded(Mlp(16, 10, 10))
    yardstick, before = _prepared(module, [(_random(32, 16, level=9),)])
    rounds = tuple(TrainedParameter(entry.names, entry.tensors, True, entry.scale) for entry in yardstick.trained)
    yardstick = ValidationLoss(yardstick.teacher, rounds, yardstick.batches, "32-true")
    after, count = correct_biases(yardstick, before)
    assert count == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


class _Operators(nn.Module):
    """A linear layer, a normalisation and a product, each without a module, as in programs of other formats."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(_random(16, 16)), nn.Parameter(_random(16))
        self.factor, self.shift = nn.Parameter(_random(16, seed=1)), nn.Parameter(_random(16, seed=2))
        self.single = nn.Parameter(torch.ones(1))
        self.table, self.last = nn.Parameter(_random(16, 16, seed=3)), nn.Parameter(_random(16, seed=4))

    def forward(self, x: torch.Tensor) -> Any:
        ops = torch.ops.aten
        x = ops.linear.default(x, self.weight, self.bias)
        x = ops.layer_norm.default(x, [16], self.factor, self.shift)
        return (x @ self.table + self.last) + self.single


def test_layers_without_a_module_are_corrected_too() -> None:
    """The operation that adds a bias identifies it. A normalisation's factor and a single number are not biases."""
    yardstick, before = _prepared(_Operators(), [(_random(64, 16, level=30),)])
    after, count = correct_biases(yardstick, before)
    assert count == 3
    for name in ("inner.factor", "inner.single"):
        assert torch.equal(after[name], before[name])
    assert yardstick.loss(after) < yardstick.loss(before) / 4
    assert torch.allclose(_answers(yardstick, None).mean(0), _answers(yardstick, after).mean(0), atol=1e-5)


def test_values_that_are_not_finite_move_no_bias() -> None:
    """On these inputs fp16 overflows and fp32 does not."""
    yardstick, before = _prepared(seeded(Mlp()), [(_random(8, 16, level=1e5),)], precision="16-mixed")
    after, _ = correct_biases(yardstick, before)
    assert all(bool(torch.isfinite(value).all()) for value in after.values())


def test_the_average_error_of_the_arithmetic_is_corrected_too() -> None:
    """bf16 rounds 1026 to 1024."""
    x = torch.cat([torch.full((256, 8), 1026.0), _random(256, 8).mul(40).round()], 1)
    module = nn.Sequential(seeded(nn.Linear(16, 8)))
    missing = []
    for precision in ("32-true", "bf16-mixed"):
        yardstick, before = _prepared(module, [(x,)], precision=precision)
        after, _ = correct_biases(yardstick, before)
        yardstick = ValidationLoss(yardstick.teacher, yardstick.trained, yardstick.batches, "bf16-mixed")
        missing.append((_answers(yardstick, None).mean(0) - _answers(yardstick, after).float().mean(0)).abs().max())
    assert float(missing[1]) < float(missing[0]) / 3


def test_the_module_is_left_unchanged() -> None:
    yardstick, before = _prepared(seeded(Mlp()), [(_random(8, 16),)])
    correct_biases(yardstick, before)
    for name, value in lessonplans.state(yardstick.teacher, yardstick.trained).items():
        assert torch.equal(value, before[name])
