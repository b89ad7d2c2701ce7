"""Finding the model's weights among others by their prefix, and when the user must choose one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import Mlp, seeded
from lightningfiles import state
from torch import nn

from bf16kit.messages.errors import SourceError, UsageError
from converter.read.lightning import fit_behind_prefix


def _arrays(prefix: str = "", seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.numpy() for name, tensor in state(prefix, seed=seed).items()}


@pytest.mark.parametrize(("weights", "seed"), [(None, 1), ("model", 1), ("ema", 2), ("ema_model", 2), ("model.", 1)])
def test_an_average_beside_the_model_is_chosen_by_its_prefix(weights: str | None, seed: int) -> None:
    tensors = _arrays("model.", seed=1) | _arrays("ema_model.", seed=2) | {"loss.weight": np.ones(3, np.float32)}
    module = Mlp()
    notes = fit_behind_prefix(module, tensors, weights)
    assert torch.equal(module.up.weight, seeded(Mlp(), seed).get_parameter("up.weight"))
    other = "ema_model." if seed == 1 else "model."
    assert f"the checkpoint also has weights of this model under {other!r}; --weights PREFIX takes those" in notes
    assert "tensors that the model does not use, stored only for restore: loss.weight" in notes


def test_between_a_teacher_and_a_student_the_user_must_choose() -> None:
    tensors = _arrays("student.", seed=1) | _arrays("teacher.", seed=2)
    with pytest.raises(
        UsageError, match=r"under several prefixes, 'student.', 'teacher.'; choose one, such as --weights student"
    ):
        fit_behind_prefix(Mlp(), tensors)
    module = Mlp()
    fit_behind_prefix(module, tensors, "teacher")
    assert torch.equal(module.up.weight, seeded(Mlp(), 2).get_parameter("up.weight"))


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "model._orig_mod.", "module.model.net."])
def test_prefixes_of_wrappers_are_ignored(prefix: str) -> None:
    module = Mlp()
    fit_behind_prefix(module, _arrays(prefix))
    assert torch.equal(module.up.weight, seeded(Mlp()).get_parameter("up.weight"))


def test_the_prefix_of_a_compiled_submodule_is_ignored() -> None:
    module = nn.ModuleDict({"net": Mlp()})
    fit_behind_prefix(module, _arrays("net._orig_mod."))
    assert torch.equal(module["net"].get_parameter("up.weight"), seeded(Mlp()).get_parameter("up.weight"))


def test_an_error_describes_the_prefix_that_fits_best() -> None:
    tensors = _arrays("model.") | {"loss.weight": np.ones(3, np.float32), "model.up.bias": np.ones(3, np.float32)}
    with pytest.raises(SourceError) as refused:
        fit_behind_prefix(Mlp(), tensors)
    assert str(refused.value).splitlines()[1:] == ["  shape: up.bias is [3] in the checkpoint, [64] in the model"]
