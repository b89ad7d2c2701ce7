"""Names of a program's outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bf16kit.runtime.exported.outputs import output_names
from bf16kit.runtime.exported.values import Ref

LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def sequence(*children: Any) -> dict[str, Any]:
    return {"type": "builtins.tuple", "context": "null", "children_spec": list(children)}


def keyed(**children: Any) -> dict[str, Any]:
    context = json.dumps(list(children))
    return {"type": "builtins.dict", "context": context, "children_spec": list(children.values())}


def names(tree: Any, *results: Any, inputs: tuple[str, ...] = ()) -> tuple[str, ...]:
    module = {"module_call_graph": [{"signature": {"out_spec": json.dumps([1, tree])}}]}
    return output_names(module, results, inputs)


A, B = Ref("a"), Ref("b")


@pytest.mark.parametrize(
    ("tree", "results", "expected"),
    [
        (LEAF, (A,), ("output",)),
        (sequence(LEAF), (A,), ("output",)),
        (sequence(LEAF, LEAF), (A, B), ("output_0", "output_1")),
        (keyed(logits=LEAF, hidden=LEAF), (A, B), ("logits", "hidden")),
        (keyed(logits=LEAF, hidden=sequence(LEAF, LEAF)), (A, B, A), ("logits", "hidden.0", "hidden.1")),
        (sequence(LEAF, LEAF), (A, None), ("output", "")),
        (keyed(a=LEAF), (A, B), ("output_0", "output_1")),
        ("no tree", (A, B), ("output_0", "output_1")),
        (sequence(LEAF, LEAF) | {"context": "{"}, (A, B), ("output_0", "output_1")),
    ],
)  # fmt: skip
def test_outputs_are_named_by_their_keys_or_by_number(
    tree: Any, results: tuple[Any, ...], expected: tuple[str, ...]
) -> None:
    assert names(tree, *results) == expected


def test_an_output_with_the_name_of_an_input_gets_another_name() -> None:
    assert names(keyed(x=LEAF, y=LEAF), A, B, inputs=("x",)) == ("x_out", "y")


def test_a_key_that_is_too_long_is_not_used_as_a_name() -> None:
    assert names(keyed(**{"x" * 1000: LEAF, "y": LEAF}), A, B) == ("output_0", "output_1")


def test_a_program_without_a_tree_numbers_its_outputs() -> None:
    assert output_names({}, [A, B], []) == ("output_0", "output_1")
