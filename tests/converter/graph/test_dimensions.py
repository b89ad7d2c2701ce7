"""Free dimensions: one without a name equals no other, and a name that a run contradicts is not shared."""

from typing import Any

import pytest

from bf16kit.converter.graph.dimensions import (
    corrected_by,
    is_named,
    name_dimensions,
    reconciled,
    with_distinct_dimensions,
)
from bf16kit.numerics.tensors import TensorSpec


def _spec(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


def test_what_exporters_write_for_an_unknown_dimension_is_not_a_name() -> None:
    assert not any(map(is_named, ["", " ", "?", "*", "-1", "None", "unk", "unknown", None, 3]))
    assert all(map(is_named, ["batch", "unk__214", "p2o.DynamicDimension.0", "2*n + 1"]))


def test_every_unknown_dimension_gets_its_own_unused_name() -> None:
    named = name_dimensions([_spec("x", "?", 3, "?", "?"), _spec("y", "x_0", "?")])
    assert [spec.shape for spec in named] == [("x_0_1", 3, "x_2", "x_3"), ("x_0", "y_1")]


def test_an_output_that_is_an_input_has_the_names_of_the_input_s_dimensions() -> None:
    inputs = name_dimensions([_spec("x", "?", 4)])
    assert name_dimensions([_spec("x", "?", 4), _spec("y", "?", 4)], inputs) == (
        _spec("x", "x_0", 4),
        _spec("y", "y_0", 4),
    )


def test_loosened_specs_demand_only_fixed_sizes() -> None:
    assert with_distinct_dimensions([_spec("x", "n", "n", 4), _spec("y", "n")]) == (
        _spec("x", "x_0", "x_1", 4),
        _spec("y", "y_0"),
    )


def test_names_that_every_run_confirms_are_kept() -> None:
    specs = (_spec("a", "n", "m"), _spec("b", "n", 2))
    assert reconciled(specs, [{"a": (1, 5), "b": (1, 2)}, {"a": (3, 5), "b": (3, 2)}]) == specs


def test_a_name_that_a_run_contradicts_stays_with_the_first_group_of_equal_sizes() -> None:
    specs = [_spec("a", "n", 2), _spec("b", "n"), _spec("c", "n", "n"), _spec("d", "n")]
    first = {"a": (4, 2), "b": (4,), "c": (4, 4), "d": (4,)}
    second = {"a": (4, 2), "b": (4,), "c": (7, 4), "d": (7,)}
    assert [spec.shape for spec in reconciled(specs, [first, second])] == [
        ("n", 2),
        ("n",),
        ("c_0", "n"),
        ("c_0",),  # it has the size of c's first axis in every run, so it shares that name
    ]


def test_a_tensor_that_no_run_has_keeps_its_names() -> None:
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
def test_sizes_that_shapes_contradict_become_unknown(
    declared: tuple[Any, ...], shapes: list[Any], given: tuple[Any, ...]
) -> None:
    assert corrected_by(TensorSpec("y", "float32", declared), shapes).shape == given
