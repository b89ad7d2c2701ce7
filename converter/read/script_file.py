"""Reads TorchScript files: the module, and the tensors that it was saved with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import RuntimeFailure, SourceError
from bf16kit.runtime import scriptgraph
from converter.process.quiet import quiet
from converter.read import torch_records
from converter.source import Array

if TYPE_CHECKING:
    import torch

CONSTANT = "constants."  # prefix of the names of tensors that are constants of the code


def load(path: Path) -> Any:
    """Load the module at ``path`` in evaluation mode on the CPU, its graph inlined; a ``torch.jit.ScriptModule``.

    Loading runs the code in the file. Raises :class:`SourceError` for a file that is damaged or has no ``forward``.
    """
    torch_records.check_bytes(path)
    import torch

    from bf16kit.runtime.torchscript import load_module

    try:
        with quiet():
            return load_module(path, torch.device("cpu"))
    except RuntimeFailure as error:
        raise SourceError(f"{path}: {error}") from None


def tensors(module: Any) -> dict[str, torch.Tensor]:
    """Return every tensor that ``module`` was saved with, by name.

    They are parameters, buffers, other attributes, and constants of the code, which a frozen module has instead. A
    tensor with two names occurs twice, as in a ``state_dict``.
    """
    import torch

    found = dict(module.state_dict())
    places = {_place(tensor) for tensor in found.values()}
    number = 0
    for node in scriptgraph.nodes(module.graph):
        for name, tensor in _of_node(module, node):
            if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or _place(tensor) in places:
                continue
            places.add(_place(tensor))
            number += 1
            found[name or f"{CONSTANT}{number - 1}"] = tensor
    return found


def _of_node(module: Any, node: Any) -> Iterator[tuple[str, Any]]:
    if node.kind() == "prim::Constant" and node.hasAttribute("value") and node.kindOf("value") == "t":
        yield "", node.t("value")
    elif node.kind() == "prim::GetAttr" and node.output().type().kind() in ("TensorType", "ListType"):
        path = scriptgraph.path_of(node)
        value = scriptgraph.owner_of(module, node).getattr(path[-1])
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            yield ".".join(path) + (f".{index}" if isinstance(value, list) else ""), one


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def arrays(path: Path, found: dict[str, torch.Tensor]) -> dict[str, Array]:
    """Return ``found`` as numpy arrays over the same memory.

    Raises :class:`SourceError` for a dtype that numpy does not have.
    """
    from converter.read import torch_file

    return torch_file.to_numpy(path, found)


_ASKING = frozenset(
    {
        *("aten::Bool", "aten::Float", "aten::FloatImplicit", "aten::Int", "aten::IntImplicit", "aten::ScalarImplicit"),
        *("aten::equal", "aten::is_nonzero", "aten::item", "prim::tolist"),
    }
)


def decides_by_numbers(module: Any) -> bool:
    """Return whether ``module`` branches on the values of a tensor that is not computed from sizes alone.

    In such a module one row may affect another row's result.
    """
    graph = module.graph
    return any(node.kind() in _ASKING and not _of_sizes(node.inputsAt(0)) for node in scriptgraph.nodes(graph))


def _of_sizes(value: Any) -> bool:
    """Return whether a tensor is computed only from sizes, as in a trace, and from constants."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if value.debugName() in seen or value.type().kind() != "TensorType":
            continue
        seen.add(value.debugName())
        node = value.node()
        if node.kind() in ("prim::NumToTensor", "prim::Constant"):
            continue
        if not node.kind().startswith("aten::"):
            return False
        waiting += list(node.inputs())
    return True
