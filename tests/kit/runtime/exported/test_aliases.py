"""A program may write into its own values, but not into inputs, weights or parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import exportedfiles as files
import pytest
import torch
from torch.nn.functional import dropout, relu

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported import operators
from bf16kit.runtime.exported.archive import read_archive
from bf16kit.runtime.exported.graph import Program, parse_program

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Written(torch.nn.Module):
    """A module with a weight, a buffer and a norm. The caller gives its ``forward``."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("kept", torch.zeros(8))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._forward(self, x)
        return found


def parse(forward: Forward, module: type[Written] = Written) -> Program:
    archive = read_archive(memoryview(bytearray(files.exported(module(forward), torch.ones(2, 8)))))
    return parse_program(archive.program, archive.tensors)


def slice_of_a_buffer(module: Any, x: torch.Tensor) -> torch.Tensor:
    kept: torch.Tensor = module.kept
    kept[0:1].add_(1.0)
    return x + kept


def columns(_: Any, x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 7.0
    return x * 2


def through(view: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        view(x).mul_(2.0)
        return x + 1

    return forward


def in_a_mode(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x.view(-1).mul_(2.0)
        return x + 1


def from_a_mode(_: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        part = x.view(-1)
    return part.mul_(2.0)


REFUSED: dict[str, Forward] = {
    "a slice of a buffer": slice_of_a_buffer,
    "columns of an input": columns,
    "a view": through(lambda x: x.view(-1)),
    "a view of a view": through(lambda x: x.view(-1)[3:].unsqueeze(0)),
    "transposed": through(lambda x: x.transpose(0, 1)),
    "expanded": through(lambda x: x.unsqueeze(0).expand(1, -1, -1)),
    "reshaped": through(lambda x: x.reshape(-1)),
    "made contiguous": through(lambda x: x.contiguous()),
    "converted to what it is": through(lambda x: x.to(torch.float32)),
    "detached": through(lambda x: x.detach()),
    "one of several": through(lambda x: torch.split(x, 4, 1)[1]),
    "strided": through(lambda x: x.as_strided((2,), (1,))),
    "dropped from": through(lambda x: dropout(x, training=False)),
    "of a sum of one": through(lambda x: torch.einsum("ij->ji", x)),
    "in a mode": in_a_mode,
    "from a mode": from_a_mode,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_write_into_part_of_an_input_or_weight_is_rejected(kind: str) -> None:
    with pytest.raises(
        RuntimeFailure, match=r"writes into .*, which may share memory with an input or weight.*decompos"
    ):
        parse(REFUSED[kind])


def after_own(module: Any, x: torch.Tensor) -> torch.Tensor:
    found = relu(module.norm(module.linear(x)), inplace=True)
    found += module.kept
    found.mul_(x)
    copy = x.clone()
    copy[:, 1:3].add_(1.0)
    made = torch.zeros(2, 8)
    made[0] = module.kept
    part = (x + 1).view(-1)[4:]
    part.sigmoid_()
    return found.add_(copy) + made.sum() + part.sum() + torch.tensor([1.0, 2.0]).sum()


def own_in_a_mode(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found = relu(module.linear(x), inplace=True)
    return found.mul_(2.0)


@pytest.mark.parametrize("forward", [after_own, own_in_a_mode])
def test_a_program_may_write_into_its_own_values(forward: Forward) -> None:
    targets = [node.target for node in parse(forward).graph.nodes]
    assert forward is own_in_a_mode or "torch.ops.aten.relu_.default" in targets


def test_a_name_used_twice_refers_to_its_last_value(mlp_archive: bytes) -> None:
    """The first node names a new tensor ``own``; the second uses the name again, for a part of an input."""

    def call(target: str, given: str, gives: str) -> dict[str, Any]:
        inputs = [{"name": "self", "arg": {"as_tensor": {"name": given}}, "kind": 1}]
        return {
            "target": f"torch.ops.aten.{target}.default",
            "inputs": inputs,
            "outputs": [{"as_tensor": {"name": gives}}],
            "metadata": {},
        }

    def edit(program: Any, *, back: bool) -> None:
        nodes = [call("clone", "x", "own"), *([call("detach", "x", "own")] if back else []), call("relu_", "own", "z")]
        program["graph_module"]["graph"]["nodes"][:0] = nodes

    def read(back: bool) -> Program:
        changed = files.changed(mlp_archive, files.MODEL, lambda program: edit(program, back=back))
        archive = read_archive(memoryview(bytearray(changed)))
        return parse_program(archive.program, archive.tensors)

    read(back=False)
    with pytest.raises(RuntimeFailure, match="writes into 'own'"):
        read(back=True)


@pytest.mark.parametrize("target", ["batch_norm", "native_batch_norm", "instance_norm"])
def test_a_norm_that_writes_its_statistics_is_rejected(target: str) -> None:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        norm = module.norm
        given = (x, norm.weight, norm.bias, norm.running_mean, norm.running_var, False, 0.1, 1e-5)
        return torch.batch_norm(*given, False)

    def train(program: Any) -> None:
        node = files.node(program)
        node["target"] = f"torch.ops.aten.{target}.default"
        node["inputs"][5]["arg"] = {"as_bool": True}

    archive = files.exported(Written(forward), torch.ones(2, 8))
    archive = files.changed(archive, files.MODEL, train)
    found = read_archive(memoryview(bytearray(archive)))
    with pytest.raises(RuntimeFailure, match="writes into its running statistics; export the module in evaluation"):
        parse_program(found.program, found.tensors)


def test_torch_declares_no_alias_for_operators_listed_as_fresh() -> None:
    """torch's schema declares which overloads return a part of an argument, except for overloads that are composed of
    other operators."""
    for name in operators.FRESH:
        packet = getattr(torch.ops.aten, name)
        for overload in (getattr(packet, each) for each in packet.overloads()):
            schema = overload._schema
            if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
                continue  # it writes into its argument, and is rejected for that reason
            assert all(each.alias_info is None for each in schema.returns), overload
