"""Names of free dimensions: what nobody named is equal to nothing, and what a run contradicts is not believed."""

from __future__ import annotations

from typing import Any

import pytest

from bf16kit.tensors import TensorSpec
from converter.graph.dimensions import as_given, is_named, loosened, name_all, reconciled


def _spec(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


@pytest.mark.parametrize("dim", ["", " ", "?", "*", "-1", "None", "unk", "unknown", None, 3])
def test_what_exporters_write_for_an_unknown_dimension_is_no_name(dim: int | str | None) -> None:
    assert not is_named(dim)


@pytest.mark.parametrize("dim", ["batch", "unk__214", "p2o.DynamicDimension.0", "2*n + 1"])
def test_a_name_that_tells_dimensions_apart_is_one(dim: str) -> None:
    assert is_named(dim)


def test_every_unknown_dimension_gets_a_name_of_its_own_that_nothing_has() -> None:
    named = name_all([_spec("x", "?", 3, "?", "?"), _spec("y", "x_0", "?")])
    assert [spec.shape for spec in named] == [("x_0_1", 3, "x_2", "x_3"), ("x_0", "y_1")]


def test_an_output_that_is_an_input_has_its_dimensions_names() -> None:
    inputs = name_all([_spec("x", "?", 4)])
    assert name_all([_spec("x", "?", 4), _spec("y", "?", 4)], inputs) == (_spec("x", "x_0", 4), _spec("y", "y_0", 4))


def test_loosened_specs_demand_sizes_alone() -> None:
    assert loosened([_spec("x", "n", "n", 4), _spec("y", "n")]) == (_spec("x", "x_0", "x_1", 4), _spec("y", "y_0"))


def test_names_that_every_run_bears_out_stay() -> None:
    specs = (_spec("a", "n", "m"), _spec("b", "n", 2))
    assert reconciled(specs, [{"a": (1, 5), "b": (1, 2)}, {"a": (3, 5), "b": (3, 2)}]) == specs


def test_a_name_that_one_run_contradicts_is_left_to_those_that_agree_with_its_first_bearer() -> None:
    specs = [_spec("a", "n", 2), _spec("b", "n"), _spec("c", "n", "n"), _spec("d", "n")]
    first = {"a": (4, 2), "b": (4,), "c": (4, 4), "d": (4,)}
    second = {"a": (4, 2), "b": (4,), "c": (7, 4), "d": (7,)}
    assert [spec.shape for spec in reconciled(specs, [first, second])] == [
        ("n", 2),
        ("n",),
        ("c_0", "n"),
        ("c_0",),  # as large as c's first axis in every run, as its name says
    ]


def test_a_tensor_that_no_run_showed_keeps_its_names() -> None:
    assert reconciled([_spec("a", "n"), _spec("b", "m")], [{"a": (2,)}])[1] == _spec("b", "m")


@pytest.mark.parametrize(
    ("declared", "shapes", "given"),
    [
        ((1, "seq"), [(20, 1, 8), (31, 1, 8)], ("?", "?", "?")),
        (("n", 8), [(1, 8), (2, 8)], ("n", 8)),
        (("n", 8), [(1, 8), (2, 9)], ("n", "?")),
        ((), [(), ()], ()),
    ],
)
def test_what_shapes_contradict_is_unknown(
    declared: tuple[Any, ...], shapes: list[Any], given: tuple[Any, ...]
) -> None:
    assert as_given(TensorSpec("y", "float32", declared), shapes).shape == given
