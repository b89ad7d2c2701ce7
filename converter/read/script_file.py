"""Reads TorchScript files. The runtime checks what they may do (:mod:`bf16kit.runtime.scriptoperators`)."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import RuntimeFailure, SourceError
from bf16kit.runtime import scriptgraph, scriptrecords, torchzip
from converter.process.quiet import first_line, quiet
from converter.source import Array

if TYPE_CHECKING:
    import torch

CONSTANT = "constants."  # prefix of the names of tensors that are constants of the code
_PACKED = re.compile(r"[^/]+/(code/.*|[^/]*debug_pkl|attributes\.pkl)")  # records that torch itself compresses
_LARGEST_PACKED = 64 << 20  # bytes of those, unpacked


def load(path: Path) -> Any:
    """Load the module at ``path`` in evaluation mode on the CPU, its graph inlined; a ``torch.jit.ScriptModule``.

    Raises :class:`SourceError` for a file that is damaged, that :func:`check` rejects, or whose operators do more than
    compute.
    """
    check(path)
    import torch

    from bf16kit.runtime.torchscript import load_module

    try:
        with quiet():
            module = load_module(path, torch.device("cpu"))
    except RuntimeFailure as error:
        raise SourceError(f"{path}: {error}") from None
    except Exception as error:  # torch raises errors of any kind, and a module may have no forward
        raise SourceError(f"{path}: torch cannot load it: {first_line(error)}") from error
    scriptgraph.replace_devices(module.graph, "cpu")
    return module


def check(path: Path) -> None:
    """Raise :class:`SourceError` unless the file's records and code are safe to load.

    They are checked as before each loading of an artifact, and a source's weights must be as torch writes them.
    """
    try:
        scriptrecords.check(path)
        with zipfile.ZipFile(path) as archive:
            _check_sizes(path, torchzip.records(archive))
    except RuntimeFailure as error:
        raise SourceError(f"{path}: {str(error).partition(f'cannot load {path.name}: ')[2] or error}") from None
    except SourceError:
        raise
    except Exception as error:  # damaged archives raise nearly anything
        raise SourceError(f"{path}: is a truncated or damaged TorchScript file: {first_line(error)}") from error


def _check_sizes(path: Path, records: list[zipfile.ZipInfo]) -> None:
    packed = 0
    for info in records:
        if info.compress_type != zipfile.ZIP_STORED and not _PACKED.fullmatch(info.filename):
            raise SourceError(f"{path}: record {info.filename!r} is compressed, which torch never does")
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            sizes = f"{info.file_size} bytes, but {info.compress_size} are stored"
            raise SourceError(f"{path}: damaged: record {info.filename!r} claims {sizes}")
        packed += info.file_size if _PACKED.fullmatch(info.filename) else 0
    if packed > _LARGEST_PACKED:
        raise SourceError(f"{path}: has {packed} bytes of code and its places in sources, over {_LARGEST_PACKED}")


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
