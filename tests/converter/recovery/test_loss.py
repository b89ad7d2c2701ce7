"""The loss that a recovery minimises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bf16kit.drift import metrics as drift
from bf16kit.messages.errors import UsageError
from bf16kit.numerics.tensors import TensorSpec
from converter.recovery.loss import cross_entropy, distillation, logits_of


def _pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(shape, generator=generator)
    return reference, reference + 0.1 * torch.randn(shape, generator=generator)


def test_distillation_is_the_square_of_the_budgets_distance() -> None:
    reference, answer = _pair(5, 7)
    found = distillation({"y": answer}, {"y": reference}, 5)
    rows = drift.measure(reference.numpy(), answer.numpy(), TensorSpec("y", "float32", ("batch", 7)), 0)
    assert float(found) == pytest.approx(np.mean([row.relative_l2**2 for row in rows]), rel=1e-5)


def test_outputs_have_equal_weight_and_one_without_rows_is_one_sample() -> None:
    reference, answer = _pair(5, 7)
    apart = [float(distillation({"y": a}, {"y": r}, len(r))) for a, r in ((answer, reference), (answer * 3, reference))]
    both = distillation({"a": answer, "b": answer * 3}, {"a": reference, "b": reference}, 5)
    assert float(both) == pytest.approx(np.mean(apart), rel=1e-6)
    whole = distillation({"y": answer}, {"y": reference}, 4)
    assert float(whole) == pytest.approx(float((answer - reference).norm() / reference.norm()) ** 2, rel=1e-5)


def test_elements_that_fp32_masks_are_left_out() -> None:
    reference, answer = _pair(5, 7)
    masked, different = reference.clone(), answer.clone()
    masked[:, 0], different[:, 0] = -torch.inf, 1e9
    found = distillation({"y": different.requires_grad_()}, {"y": masked}, 5)
    assert found.item() == pytest.approx(float(distillation({"y": answer[:, 1:]}, {"y": reference[:, 1:]}, 5)))
    torch.autograd.backward(found)
    assert different.grad is not None
    assert torch.isfinite(different.grad).all()


def test_an_output_of_zeros_has_a_finite_loss() -> None:
    zeros = torch.zeros(2, 3)
    assert float(distillation({"y": zeros}, {"y": zeros}, 2)) == 0.0


def test_a_model_with_integer_outputs_alone_is_rejected() -> None:
    with pytest.raises(UsageError, match="no output of the model holds floats: y"):
        distillation({"y": torch.ones(2, dtype=torch.int64)}, {"y": torch.ones(2, dtype=torch.int64)}, 2)


def test_cross_entropy_takes_rows_of_any_rank_and_ignores_what_torch_ignores() -> None:
    logits, _ = _pair(2, 3, 4)
    labels = torch.tensor([[0, 1, -100], [3, -100, 2]])
    kept = labels != -100
    expected = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
    assert float(cross_entropy(logits.bfloat16(), labels)) == pytest.approx(float(expected), rel=1e-2)
    assert float(cross_entropy(logits, labels)) == pytest.approx(float(expected), rel=1e-6)


def test_labels_belong_to_the_only_output_that_holds_logits() -> None:
    logits, other = TensorSpec("y", "float32", (), "logits"), TensorSpec("z", "float32", ())
    assert logits_of([other, logits]) == "y"
    assert logits_of([other]) is None
    assert logits_of([logits, TensorSpec("w", "float32", (), "logits")]) is None
