"""Arguments that do not fit together are rejected before an operator that trusts them touches memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported import operators
from bf16kit.runtime.exportedguards import with_argument_checks

SUPPORT = Path(__file__).parents[2] / "support"


def call(target: str, *args: Any, **kwargs: Any) -> Any:
    name, overload = target.split(".")
    operator = getattr(getattr(torch.ops.aten, name), overload)
    return with_argument_checks(name, operator, operator)(*args, **kwargs)


X = torch.ones(2, 4096, 1, 1)
SHORT, FULL = torch.ones(1), torch.ones(4096)
IMAGE = torch.ones(1, 1, 4, 4)
Q = torch.ones(1, 2, 64, 8)
LSTM = [torch.ones(16, 3), torch.ones(16, 4), torch.ones(16), torch.ones(16)]
STATES = [torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)]
SEQUENCE = torch.ones(5, 2, 3)
PACKED, STATES_1 = torch.ones(4, 3), [torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)]
GRU = [torch.ones(12, 3), torch.ones(12, 4), torch.ones(12), torch.ones(12)]
ONE_LAYER = (True, 1, 0.0, False, False)

REFUSED: dict[str, tuple[Any, ...]] = {
    "statistics of one channel": ("native_batch_norm.default", X, None, None, SHORT, SHORT, False, 0.1, 1e-5),
    "a weight of one channel": ("native_batch_norm.default", X, SHORT, None, FULL, FULL, False, 0.1, 1e-5),
    "statistics missing": ("native_batch_norm.default", X, None, None, None, None, False, 0.1, 1e-5),
    "the same, not for training": (
        "_native_batch_norm_legit_no_training.default", X, FULL, FULL, SHORT, SHORT, 0.1, 1e-5,
    ),
    "groups of another size": ("native_group_norm.default", X, None, None, 2, 4096, 1000, 1, 1e-5),
    "no groups": ("native_group_norm.default", X, None, None, 2, 4096, 1, 0, 1e-5),
    "a length for one row": ("_weight_norm_interface.default", torch.ones(64, 8), torch.ones(1, 1), 0),
    "the same by its other name": ("_weight_norm.default", torch.ones(64, 8), torch.ones(1, 1), 0),
    "a mask of another size": (
        "_scaled_dot_product_flash_attention_for_cpu.default", Q, Q, Q, 0.0, False, torch.ones(2, 2),
    ),
    "fewer values than keys": ("_scaled_dot_product_flash_attention_for_cpu.default", Q, Q, Q[:, :, :3]),
    "keys of another width": ("scaled_dot_product_attention.default", Q, Q[..., :4], Q),
    "a place beyond 64 bits": ("upsample_nearest2d.default", IMAGE, [8, 8], 1e-30, 1e-30),
    "no keys": ("_scaled_dot_product_flash_attention_for_cpu.default", Q, Q[:, :, :0], Q[:, :, :0]),
    "no queries": ("_scaled_dot_product_flash_attention_for_cpu.default", Q[:, :, :0], Q, Q),
    "no heads": ("_scaled_dot_product_flash_attention_for_cpu.default", Q[:, :0], Q[:, :0], Q[:, :0]),
    "a scale beyond the source": ("_upsample_bilinear2d_aa.default", IMAGE, [8, 8], False, 1e-6, 1e-6),
    "repeats below zero": ("repeat_interleave.Tensor", torch.tensor([50, -40])),
    "the same of values": ("repeat_interleave.self_Tensor", torch.ones(2, 3), torch.tensor([50, -40]), 0),
    "repeats beyond 64 bits": ("repeat_interleave.Tensor", torch.tensor([2**62] * 4)),
    "more windows than 64 bits count": ("im2col.default", IMAGE, [2, 2], [2**61] * 2, [2**61] * 2, [1, 1]),
    "the same of smaller settings": ("im2col.default", IMAGE, [2, 2], [1, 1], [2**30] * 2, [1, 1]),
    "the same the other way": ("col2im.default", IMAGE[0], [2**30] * 2, [2, 2], [1, 1], [2**31] * 2, [1, 1]),
    "one setting for two axes": ("im2col.default", IMAGE, [2, 2], [1], [0, 0], [1, 1]),
    "a mode that there is not": ("grid_sampler_2d.default", IMAGE, torch.ones(1, 2, 2, 2), 9, 0, False),
    "a number of nothing": ("_local_scalar_dense.default", torch.ones(0)),
    "bags that overlap": ("embedding_bag.default", torch.ones(4, 2), torch.tensor([0, 1]), torch.tensor([0, 2, 1])),
    "the least number by -1": ("remainder.Scalar", torch.tensor([-(2**63)]), -1),
    "the same of tensors": ("floor_divide.default", torch.tensor([-(2**63)]), torch.tensor([-1])),
    "weights for another input": ("lstm.input", SEQUENCE[..., :2], STATES, LSTM, True, 1, 0.0, False, False, False),
    "states of another batch": ("lstm.input", SEQUENCE[:, :1], STATES, LSTM, True, 1, 0.0, False, False, False),
    "layers without weights": ("lstm.input", SEQUENCE, STATES, LSTM, True, 2**62, 0.0, False, False, False),
    "more sequences than states": ("lstm.data", PACKED, torch.tensor([2, 2]), STATES_1, LSTM, *ONE_LAYER),
    "no steps": ("lstm.data", PACKED, torch.tensor([], dtype=torch.int64), STATES_1, LSTM, *ONE_LAYER),
    "more sequences later": ("lstm.data", PACKED, torch.tensor([1, 3]), STATES_1, LSTM, *ONE_LAYER),
    "fewer rows than steps": ("gru.data", PACKED, torch.tensor([2, 1, 1, 1]), STATES[0], GRU, *ONE_LAYER),
    "a step of nothing": ("gru.data", PACKED, torch.tensor([2, 2, 0]), STATES[0], GRU, *ONE_LAYER),
    "a number for a dtype": ("softmax.int", FULL, 0, 2**20),
    "a number for the dtype of a view": ("view.dtype", FULL, 99),
    "strides below zero": ("empty_strided.default", [2], [-1]),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_arguments_that_do_not_fit_together_are_rejected(kind: str) -> None:
    target, *args = REFUSED[kind]
    with pytest.raises(RuntimeFailure, match=rf"the arguments of {target.split('.')[0]} do not fit together"):
        call(target, *args)


ANSWERED: dict[str, tuple[Any, ...]] = {
    "native_batch_norm": ("native_batch_norm.default", X, FULL, None, FULL, FULL, False, 0.1, 1e-5),
    "no training": ("_native_batch_norm_legit_no_training.default", X, FULL, FULL, FULL, FULL, 0.1, 1e-5),
    "no statistics": ("_native_batch_norm_legit.no_stats", X, FULL, FULL, True, 0.1, 1e-5),
    "native_group_norm": ("native_group_norm.default", X, FULL, FULL, 2, 4096, 1, 8, 1e-5),
    "_weight_norm_interface": ("_weight_norm_interface.default", torch.ones(64, 8), torch.ones(64, 1), 0),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu.default", Q, Q, Q, 0.0, False),
    "a mask for all heads": ("scaled_dot_product_attention.default", Q, Q, Q, torch.ones(64, 64)),
    "upsample": ("upsample_nearest2d.default", IMAGE, [8, 8], 2.0, 2.0),
    "upsample, smoothed": ("_upsample_bilinear2d_aa.default", IMAGE, [6, 2], False, 1.6, 0.5),
    "im2col": ("im2col.default", IMAGE, [2, 2], [1, 1], [1, 0], [2, 1]),
    "col2im": ("col2im.default", torch.ones(1, 4, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    "upsample by size": ("_upsample_bicubic2d_aa.default", IMAGE, [6, 2], False),
    "repeat_interleave": ("repeat_interleave.self_Tensor", IMAGE, torch.tensor([1, 0, 3, 2]), 2),
    "grid_sampler": ("grid_sampler.default", IMAGE, torch.ones(1, 2, 2, 2), 0, 0, False),
    "lstm": ("lstm.input", SEQUENCE, STATES, LSTM, True, 1, 0.0, False, False, False),
    "gru, packed": ("gru.data", PACKED, torch.tensor([2, 1, 1]), STATES[0], GRU, *ONE_LAYER),
    "remainder": ("remainder.Scalar", torch.tensor([5]), -1),
    "_cdist_forward": ("_cdist_forward.default", torch.ones(2, 3), torch.ones(4, 3), 2.0, None),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERED)
def test_arguments_that_fit_give_the_same_results_as_in_torch(kind: str) -> None:
    target, *args = ANSWERED[kind]
    name, overload = target.split(".")
    found, wanted = call(target, *args), getattr(getattr(torch.ops.aten, name), overload)(*args)
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_uninitialized_memory_is_zeros() -> None:
    for _ in range(5):
        used = torch.full((4096,), 7.0)
        del used
        for target, *args in (
            ("empty.memory_format", [4096]),
            ("empty_like.default", FULL),
            ("new_empty.default", X, [4096]),
        ):
            assert call(target, *args).eq(0).all(), target
        assert call("empty_strided.default", [2], [2000]).as_strided((2001,), (1,)).eq(0).all()
        into = torch.ones(4001)[::4000]
        assert call("copy.default", into, torch.zeros(2)).untyped_storage().nbytes() == 8


def test_an_overload_that_only_torchscript_uses_is_rejected() -> None:
    with pytest.raises(RuntimeFailure, match=r"'aten\.to\.prim_dtype', which torch\.export never writes"):
        call("to.prim_dtype", FULL, 2**20)


def test_side_results_of_embedding_bag_are_none() -> None:
    found = call("embedding_bag.default", torch.ones(4, 2), torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert found[0].shape == (2, 2)
    assert found[1:] == (None, None, None)


def test_operators_that_alias_without_bounds_checks_are_not_allowed() -> None:
    assert not {"_reshape_alias", "set_", "resize_", "_index_put_impl_"} & (operators.ATEN | operators.IN_PLACE)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_no_operator_crashes_the_process_whatever_its_arguments(seed: int) -> None:
    """Random arguments, in a separate process, give an error or a result, never a signal."""
    command = [sys.executable, "-m", "operatorcalls", str(seed), "8"]
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    lines = ended.stdout.splitlines()
    assert (ended.returncode, lines[-1]) == (0, "done"), ended.stderr[-1000:]
    answered = sum(int(line.split()[1]) > 0 for line in lines if " " in line)
    assert answered > 200  # the calls reach the kernels
