"""Counting operations from shapes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from converter.islands.costs import flops


def node(op_type: str, *inputs: ir.Value, domain: str = "") -> ir.Node:
    return ir.Node(domain, op_type, inputs, name="n")


def value(name: str) -> ir.Value:
    return ir.Value(name=name)


@pytest.mark.parametrize("op_type", ["MatMul", "Conv", "ConvTranspose", "LSTM"])
def test_an_operator_of_an_unknown_domain_counts_its_elements_whatever_its_name(op_type: str) -> None:
    assert flops(node(op_type, domain="example.org"), {"n": (2, 3)}) == 6


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_a_product_counts_two_for_each_multiplication(domain: str) -> None:
    left, right = value("left"), value("right")
    left.shape = ir.Shape([2, 5])
    assert flops(node("MatMul", left, right, domain=domain), {"n": (2, 3)}) == 2 * 2 * 3 * 5
