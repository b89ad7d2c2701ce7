"""torch's operators that the converter translates itself compute what torch computes."""

from typing import Any

import numpy as np
import pytest
import torch
from lowered import run_exported
from torch import nn

import graphs
from bf16kit.converter.read.onnx_export import adapt, to_onnx
from bf16kit.numerics.tensors import TensorSpec

X = (TensorSpec("x", "float32", ("batch", 16)),)
IDS = TensorSpec("ids", "int64", ("batch", "seq"))
OFFSETS = TensorSpec("offsets", "int64", ("bags",))


class _Copying(nn.Module):
    """x [batch, 16] → x with its first column in three others. torch's own translation of copy_ does not broadcast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 3:6].copy_(x[:, :1])
        return y


def test_what_is_copied_into_a_part_of_a_tensor_is_broadcast_to_it() -> None:
    x = graphs.values(3, 16)
    found = run_exported(to_onnx(adapt(_Copying(), X), {}), X, x=x)["output"]
    np.testing.assert_array_equal(found, _Copying()(torch.from_numpy(x)).numpy())


@pytest.mark.parametrize(("bias", "batch"), [(False, ("batch",)), (True, ("batch",)), (True, ())])
def test_volumes_are_convolved_with_and_without_a_bias_or_a_batch(bias: bool, batch: tuple[str, ...]) -> None:
    module = nn.Conv3d(2, 4, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), groups=2, bias=bias).requires_grad_(False)
    inputs = (TensorSpec("x", "float32", (*batch, 2, 3, "h", 8)),)
    x = graphs.values(*[2 for _ in batch], 2, 3, 6, 8)
    found = run_exported(to_onnx(adapt(module, inputs), {}), inputs, x=x)["output"]
    np.testing.assert_allclose(found, module(torch.from_numpy(x)).numpy(), rtol=1e-5, atol=1e-6)


def test_the_logarithm_of_a_sigmoid_is_finite_where_the_sigmoid_vanishes() -> None:
    x = np.linspace(-200, 200, 48, dtype=np.float32).reshape(3, 16)
    found = run_exported(to_onnx(adapt(nn.LogSigmoid(), X), {}), X, x=x)["output"]
    np.testing.assert_allclose(found, nn.LogSigmoid()(torch.from_numpy(x)).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean", "padding_idx": -1},
        {"mode": "max", "padding_idx": 3},
        {"mode": "mean", "include_last_offset": True},
    ],
)
def test_bags_are_summed_at_once_not_one_after_the_other(options: dict[str, Any]) -> None:
    """torch's own translation takes 100 times as long for 8,192 bags, and fails without any."""
    bag, specs = nn.EmbeddingBag(50, 8, **options), (TensorSpec("input", "int64", ("n",)), OFFSETS)
    graph = to_onnx(adapt(bag, specs), {})
    assert "Loop" not in [node.op_type for node in graph.graph.all_nodes()]
    ids = np.array([3, 3, 4, 3, 49, 0, 49, 3, 1])
    for offsets in ([0, 2, 2, 5, 9], [0], [0, 0, 9]):
        fed = {"input": ids, "offsets": np.array(offsets)}
        wanted = bag(**{name: torch.from_numpy(array) for name, array in fed.items()}).detach().numpy()
        np.testing.assert_allclose(run_exported(graph, specs, **fed)["output"], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_each_row_is_a_bag_also_none(dtype: str) -> None:
    bag, specs = nn.EmbeddingBag(50, 8, mode="max", padding_idx=0), (TensorSpec("input", dtype, ("batch", 3)),)
    graph = to_onnx(adapt(bag, specs), {})
    ids = np.array([[0, 0, 0], [3, 0, 9]], dtype)
    np.testing.assert_array_equal(
        run_exported(graph, specs, input=ids)["output"], bag(torch.from_numpy(ids)).detach().numpy()
    )
    assert run_exported(graph, specs, input=ids[:0])["output"].shape == (0, 8)


def test_the_weights_of_what_is_in_a_bag_are_an_input() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, 8, mode="sum")

        def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> Any:
            return self.bag(ids, per_sample_weights=weights)

    module, specs = Weighted(), (IDS, TensorSpec("weights", "float32", ("batch", "seq")))
    fed = {"ids": np.array([[3, 4, 3], [0, 49, 0]]), "weights": graphs.values(2, 3)}
    wanted = module(*map(torch.from_numpy, fed.values())).detach().numpy()
    found = run_exported(to_onnx(adapt(module, specs), {}), specs, **fed)["output"]
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool1d(2), nn.MaxPool1d(3, 2, 1), nn.MaxPool1d(kernel_size=(2,), dilation=2, ceil_mode=True)],
    ids=str,
)
def test_the_length_that_is_pooled_is_free(pool: nn.Module) -> None:
    """torch's own export fixes it."""
    specs = (TensorSpec("input", "float32", ("batch", 4, "length")),)
    graph = to_onnx(adapt(nn.Sequential(nn.Conv1d(4, 4, 1), pool), specs), {})
    again = to_onnx(adapt(pool, specs), {})
    for length in (5, 12):
        x = graphs.values(2, 4, length)
        assert run_exported(graph, specs, input=x)["output"].shape == pool(torch.from_numpy(x)).shape
        np.testing.assert_array_equal(run_exported(again, specs, input=x)["output"], pool(torch.from_numpy(x)).numpy())
