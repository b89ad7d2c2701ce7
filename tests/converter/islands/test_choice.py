"""Choosing a set of islands: few trials, and an order that does not depend on how a process orders its sets."""

from __future__ import annotations

import random

import onnx_ir as ir

from converter.islands.candidates import Unit, flop_shares
from converter.islands.choice import Group, Units, smallest


def unit(name: str) -> Unit:
    return Unit("node", name, "Add", 0.1)


def test_units_of_one_group_are_removed_in_reverse_order_of_their_names() -> None:
    names = [f"n{i:02}" for i in range(32)]
    random.Random(0).shuffle(names)
    found = smallest([Group(tuple(map(unit, names)), 1.0)], 0.1, lambda units: len(units) >= 16)
    assert found is not None
    assert sorted(each.name for each in found) == sorted(names)[:16], "the last ones are taken out first"


def test_hundreds_of_islands_that_are_all_needed_take_few_trials() -> None:
    units = [unit(f"n{i}") for i in range(256)]
    tried: list[Units] = []

    def suffices(chosen: Units) -> bool:
        tried.append(chosen)
        return len(chosen) == len(units)

    assert smallest([Group((each,), 1.0) for each in units], 0.1, suffices) == frozenset(units)
    assert len(tried) < 120


def test_a_weight_comes_with_the_nodes_that_read_it_and_no_unit_is_lost() -> None:
    weight = Unit("weight", "w", "MatMul", 0.1, ("a", "b"))
    groups = [Group((weight, unit("c")), 3.0), Group((unit("a"),), 1e-4), Group((unit("b"), unit("d")), 1e-4)]
    tried: list[Units] = []

    def suffices(chosen: Units) -> bool:
        tried.append(chosen)
        return {weight, unit("a"), unit("b")} <= chosen

    assert smallest(groups, 0.1, suffices) == frozenset({weight, unit("a"), unit("b")})
    assert tried[0] == {weight, *map(unit, "abcd")}


def test_a_product_counts_its_multiplications_and_an_unknown_operator_of_that_name_its_elements() -> None:
    left, right = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("left", "right"))
    left.shape = ir.Shape([2, 5])
    nodes = [ir.Node(domain, "MatMul", [left, right], name=f"n{domain}") for domain in ("", "com.microsoft", "other")]
    model = ir.Model(ir.Graph([left, right], [], nodes=nodes, opset_imports={"": 22}), ir_version=10)
    shares = flop_shares(model, {f"n{domain}": (2, 3) for domain in ("", "com.microsoft", "other")})
    assert shares == {"n": 60 / 126, "ncom.microsoft": 60 / 126, "nother": 6 / 126}
