"""The loss by which a recovery chooses its best weights: of the weights as published, always on the same batches."""

from __future__ import annotations

from typing import Any

import lessonplans
import numpy as np
import pytest
import torch
from architectures import Cnn, Mlp, Tied, seeded
from torch import nn

from bf16kit.messages.errors import UsageError
from converter.recovery.batches import Batch
from converter.recovery.loss import distillation
from converter.recovery.validation import as_published
from converter.recovery.weights import TrainedParameter, rounded


def _x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_loss_is_that_of_rounded_weights_over_all_lessons() -> None:
    module = seeded(Mlp())
    teacher, held = lessonplans.teacher(module), lessonplans.trained(module)
    batches = [_x(8, 16, seed=seed) for seed in range(3)]
    yardstick = lessonplans.yardstick(teacher, [(x,) for x in batches], held)
    state = {name: value * 1.01 for name, value in lessonplans.state(teacher, held).items()}
    found = yardstick.loss(state)
    other = Mlp()
    other.load_state_dict(
        {name.removeprefix("inner."): rounded(v, None) if v.ndim > 1 else v for name, v in state.items()}
    )
    with torch.no_grad():
        expected = np.mean([float(distillation({"y": other(x)}, {"y": module(x)}, 8)) for x in batches])
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_tensors_that_are_not_trained_are_the_modules_own() -> None:
    """This includes buffers, which training in bf16 rounds in its own copy."""
    module = seeded(Cnn())
    teacher = lessonplans.teacher(module, rank=4)
    held = tuple(entry for entry in lessonplans.trained(module) if entry.names[0] == "inner.head.bias")
    yardstick = lessonplans.yardstick(teacher, [(_x(4, 3, 16, 16),)], held)
    assert yardstick.loss(lessonplans.state(teacher, held)) == 0.0


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_products_have_the_precision_of_the_training(precision: Any) -> None:
    module = nn.Sequential(nn.Linear(16, 16))
    teacher = lessonplans.teacher(module)
    held = lessonplans.trained(module)
    exact = lessonplans.yardstick(teacher, [(_x(8, 16),)], held)
    other = lessonplans.yardstick(teacher, [(_x(8, 16),)], held, precision)
    answers = other.outputs({}, other.batches[0])["y"]
    assert answers.dtype == (torch.float16 if precision == "16-mixed" else torch.bfloat16)
    assert exact.outputs({}, exact.batches[0])["y"].dtype == torch.float32


def test_a_parameter_of_two_names_is_published_under_both() -> None:
    module = seeded(Tied())
    held = lessonplans.trained(module)
    tied = next(entry for entry in held if len(entry.names) == 2)
    found = as_published(held, {entry.names[0]: torch.ones(3) for entry in held})
    assert set(tied.names) <= found.keys()


def test_a_folded_factor_is_rounded_with_its_weight() -> None:
    weight, scale = _x(4, 4), torch.linspace(0.1, 3, 4, dtype=torch.float64).reshape(4, 1)
    found = as_published([TrainedParameter(("w",), ("w",), True, scale)], {"w": weight})
    assert torch.equal(found["w"], rounded(weight, scale))
    assert not torch.equal(found["w"], rounded(weight, None))


def test_the_cross_entropy_loss_uses_the_labels() -> None:
    module = seeded(Mlp())
    teacher = lessonplans.teacher(module, loss="cross-entropy")
    x, labels = _x(4, 16), np.array([1, 2, -100, 3])
    lesson = teacher.compute(Batch({"a": x.numpy()}, labels))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(module(x), torch.from_numpy(labels))
        assert float(teacher.loss({"y": module(x)}, lesson)) == pytest.approx(float(expected))


def test_labels_that_fit_no_class_are_rejected() -> None:
    teacher = lessonplans.teacher(seeded(Mlp()), loss="cross-entropy")
    batch = Batch({"a": _x(4, 16).numpy()}, np.array([0, 1, 2, 10]), "--data m:f: batch 3")
    with pytest.raises(UsageError, match=r"^--data m:f: batch 3: label 10 is not one of the 10 classes of output 'y'"):
        teacher.compute(batch)
    with pytest.raises(UsageError, match="--data gives no labels"):
        teacher.compute(Batch(batch.feeds))


class _Masking(nn.Module):
    """A row's output is infinite if its first number is 1, NaN if its sum is also 0, and finite otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight / (x[:, :1] - 1)


def test_fp32_outputs_with_nan_or_without_a_finite_value_are_rejected() -> None:
    """Some infinite values may be intended. NaN, or an output without any finite value, is an error."""
    teacher = lessonplans.teacher(_Masking())
    fine = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    assert bool(torch.isinf(teacher.compute(Batch({"a": fine.numpy()})).reference["y"]).any())
    with pytest.raises(UsageError, match=r"^b 1: the fp32 model gives NaN in 2 of 4 elements of output 'y'"):
        teacher.compute(Batch({"a": torch.tensor([[2.0, 1.0], [1.0, -1.0]]).numpy()}, location="b 1"))
    with pytest.raises(UsageError, match=r"^b 2: the fp32 model gives no finite value in output 'y'"):
        teacher.compute(Batch({"a": fine[1:].numpy()}, location="b 2"))
