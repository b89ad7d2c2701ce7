"""Checks that a TorchScript file does nothing but compute with tensors: it names no other operators, and runs none.

Loading compiles the file's code and runs parts of it: ``__setstate__`` of its classes, default values of arguments,
values of class constants. That code can do whatever torch's operators can, and two of them write and read files by
name. So the code is checked as text before torch loads it, and its operators once it is compiled, before it is called.

This file handles torch's graph objects without importing torch, which only torchscript.py does; hence ``Any``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime import scriptgraph

# Words that a model of plain tensors does not need in its code, each with its effect. They are rejected anywhere in the
# text: what the code computes is unknown before it is compiled, and by then defaults have run.
_WORDS = {
    "save": "writes files (aten::save)",
    "from_file": "reads files, and creates them (aten::from_file)",
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
_REMEDY = "bf16kit cannot control what loaded code does, so export the model without it, or as ONNX"


def check_code(code: Mapping[str, str]) -> None:
    """Raise :class:`RuntimeFailure` if the ``code``, by record, asks for more than tensors.

    Its text shows that but for operators of other names, which :func:`check_compiled` finds.
    """
    for record, text in code.items():
        _check_words(f"its code in {record!r}", text)
        if "getattr" in _NAMED_ATTRIBUTE.sub("", text):
            raise RuntimeFailure(f"its code in {record!r} looks up an attribute whose name it computes")


def check_class(name: str) -> None:
    """Raise :class:`RuntimeFailure` if a pickle makes objects of the class ``name``, and that is not of plain tensors.

    torch finds C++ classes by their names alone, and restores their state with their own code.
    """
    _check_words("its pickle", name)


def check_compiled(functions: Iterable[Any]) -> None:
    """Raise :class:`RuntimeFailure` naming the first operator in ``functions`` that does more than compute.

    ``functions`` are all ``torch.jit.ScriptFunction`` of the file, methods included.
    """
    for function in functions:
        for kind in _kinds(function.graph):
            if not kind.startswith(_NAMESPACES) or kind.startswith(_FORBIDDEN):
                raise RuntimeFailure(f"its code uses the operator {kind[:80]}, which no model needs")


def _check_words(place: str, text: str) -> None:
    found = _WORD.search(text)
    if found is not None:
        raise RuntimeFailure(f"{place} has the word {found[1]!r}, which {_WORDS[found[1]]}; {_REMEDY}")


def _kinds(graph: Any) -> Iterator[str]:
    for node in scriptgraph.nodes(graph):
        yield node.kind()
        if node.hasAttribute("Subgraph"):  # of a fork
            yield from _kinds(node.g("Subgraph"))
