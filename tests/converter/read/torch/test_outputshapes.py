"""The outputs of a module as a run shows them: which dimensions are free, their names, and the dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.tensors import TensorSpec
from converter.read.sources import measured_outputs
from converter.read.torch.onnx_export import adapt

X = TensorSpec("x", "float32", ("batch", "seq", 4))


class Calling(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _shown(function: Callable[[torch.Tensor], torch.Tensor]) -> TensorSpec:
    (spec,) = measured_outputs(adapt(Calling(function), (X,)))
    return spec


def test_free_dimensions_have_the_names_of_the_input_dimensions_they_follow() -> None:
    assert _shown(lambda x: x.transpose(0, 1)).shape == ("seq", "batch", 4)
    assert _shown(lambda x: x.sum((0, 1))).shape == (4,)
    assert _shown(lambda x: x.sum()).shape == ()


def test_a_free_dimension_that_follows_no_single_input_dimension_has_its_own_name() -> None:
    assert _shown(lambda x: x.flatten(0, 1)).shape == ("output_0", 4)
    assert _shown(lambda x: torch.cat([x, x], 1)).shape == ("batch", "output_1", 4)


def test_dtypes_are_those_that_are_served() -> None:
    assert _shown(lambda x: x.argmax(2)).dtype == "int64"
    assert _shown(lambda x: x.bfloat16()).dtype == "float32"
    with pytest.raises(ConversionError, match="output 'output' is complex64"):
        _shown(lambda x: torch.complex(x, x))


def test_an_output_whose_rank_depends_on_the_sizes_is_rejected() -> None:
    with pytest.raises(ConversionError, match="has 3 dimensions for one input and 1 for another"):
        _shown(lambda x: x if x.shape[0] < 5 else x.flatten())


def test_if_other_sizes_fail_the_shapes_of_the_first_run_are_used() -> None:
    assert _shown(lambda x: x.reshape(2, 7, 4)).shape == ("batch", "seq", 4)
