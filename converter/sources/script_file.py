"""Reads TorchScript files: checks their contents before torch loads them, and their operators before they run.

Loading compiles the file's code and runs parts of it: ``__setstate__`` of its classes, default values of arguments,
values of class constants. That code can do whatever torch's operators can, and two of them write and read files by
name.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bf16kit.errors import RuntimeFailure, SourceError
from bf16kit.runtime import scriptgraph, scriptrecords, torchzip
from converter.model import Array
from converter.process.quiet import first_line, quiet

if TYPE_CHECKING:
    import torch

CONSTANT = "constants."  # prefix of the names of tensors that are constants of the code
_PACKED = re.compile(r"[^/]+/(code/.*|[^/]*debug_pkl|attributes\.pkl)")  # records that torch itself compresses
# Words that a model of plain tensors does not need in its code, each with its effect. They are rejected anywhere in the
# text: what the code computes is unknown before it is compiled, and by then defaults have run.
_WORDS = {
    "save": "writes files",
    "from_file": "reads files",
    "__setstate__": "runs code while it is loaded",
    "classes": "makes objects of C++ classes, as quantised models do",
    **dict.fromkeys(
        ("rpc_sync", "rpc_async", "rpc_remote", "c10d", "_c10d_functional", "symm_mem", "dist_rpc", "dist_autograd"),
        "talks to other machines",
    ),
    **dict.fromkeys(("debugprims", "inductor", "load_library"), "runs operators that no model needs"),
}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b")
_NAMED_ATTRIBUTE = re.compile(r"getattr\([\w.]+, \"[^\"\\\n]*\"\)")  # as torch writes names that are no identifiers
_NAMESPACES = ("aten::", "prim::", "torchvision::")
_FORBIDDEN = ("aten::save", "aten::from_file", "prim::rpc", "aten::dist_", "aten::to_here", "prim::PythonOp")


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
    for kind in _operators(module):
        if not kind.startswith(_NAMESPACES) or kind.startswith(_FORBIDDEN):
            raise SourceError(f"{path}: its code uses the operator {kind[:80]}, which no model needs")
    scriptgraph.replace_devices(module.graph, "cpu")
    return module


def check(path: Path) -> None:
    """Raise :class:`SourceError` unless the file's records and code are safe to load.

    The records must be as torch writes them and as long as the pickles claim. The code must ask for nothing but
    tensors, as far as its text shows before it is compiled.
    """
    try:
        code = scriptrecords.check(path)
        with zipfile.ZipFile(path) as archive:
            _check_sizes(path, torchzip.records(archive))
        for record, text in code.items():
            _check_code(path, record, text)
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
    if packed > scriptrecords.LARGEST_CODE:  # here with what belongs to the code
        raise SourceError(f"{path}: has {packed} bytes of code, expected at most {scriptrecords.LARGEST_CODE}")


def _check_code(path: Path, record: str, code: str) -> None:
    found = _WORD.search(code)
    if found is not None:
        raise SourceError(
            f"{path}: its code in {record!r} has the word {found[1]!r}, which {_WORDS[found[1]]}; bf16kit cannot"
            " control what loaded code does, so export the model without it, or as ONNX"
        )
    if "getattr" in _NAMED_ATTRIBUTE.sub("", code):
        raise SourceError(f"{path}: its code in {record!r} looks up an attribute whose name it computes")


def _operators(module: Any) -> Iterator[str]:
    """Yield the operators of every method of ``module`` and its submodules."""
    for part in module.modules():
        for name in part._c._method_names():
            method = part._c._get_method(name)
            yield from (node.kind() for node in scriptgraph.nodes(method.graph))
            yield from (node.kind() for node in scriptgraph.nodes(method.inlined_graph))


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
    from converter.sources import torch_file

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
