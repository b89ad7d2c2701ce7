"""The CPU kernel as Python sees it: a library beside this file, the path that it runs, and why it may not be used.

The library holds operators of the domain ``bf16kit``. There are products of fp32 activations and weights that stay bf16
in memory, summed in fp32: ``MatMul_…``, ``MatMul2_…`` and ``MatMul3_…`` for several weights at once, and the generic
``MatMul`` for graphs made by hand. ``MatMulBf16_…`` are the same products with activations rounded to bf16. Others are
attention (``Attention_…``, and ``AttentionBf16_…``, which rounds its operands), normalisation (``AddLayerNorm…``,
``…RmsNorm…``), and ``Gather_…``, which looks up rows in a bf16 weight. A graph with such nodes also defines them as
functions of standard operators. ONNX Runtime falls back to those functions if the library is not registered: the same
results within fp32 rounding, from weights widened at load.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.messages.errors import ConfigError
from bf16kit.numerics.tensors import BY_NAME

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

DOMAIN = "bf16kit"
LIBRARY = Path(__file__).parents[1] / "_bf16kernel.so"
VARIABLE = "BF16KIT_KERNEL_PATH"
PATHS = ("avx512_bf16", "avx512f", "avx2", "portable")  # as kernels/gemm/choose.cpp names them, fastest first
OPT_IN = ("amx",)  # used only when named: not yet run on a processor that has it
BF16 = "Bf16"  # in the names of operators that round their activations to bf16
OFF = "off"

_COST = "bf16 weights are widened to fp32 at load, which takes twice the memory and is slower for a few rows at a time"
_ONNXRUNTIME = "an onnxruntime of 1.24 to 1.31, which are tested, or a later 1.x"
_NOT_BUILT = (
    "it was not built when bf16kit was installed: there was no C++17 compiler, or it failed (pip install -v shows why)"
)
_REINSTALL = "install a C++17 compiler (on Debian: apt-get install g++) and install bf16kit again"
#: The inputs, by operator and position, that the operator's kernel reads in place, without copying them.
#: Conv is not among them: ONNX Runtime rearranges its weights when it opens a session.
_READ_IN_PLACE = {("MatMul", 1), ("Gemm", 1), ("Gather", 0)}
_OTHER_USE = ("", -1)


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel path that runs a graph; without one, the reason and the remedy."""

    path: str = ""  # one of PATHS, "" = do not register the library
    note: str = ""  # one sentence: why the kernel is not used
    advice: str = ""  # the cost of that, and the remedy

    @property
    def library(self) -> Path | None:
        """The library that a session must register, if any."""
        return LIBRARY if self.path else None


NOT_NEEDED = Kernel()


def kernel_for(model: Path | bytes | ModelProto) -> Kernel:
    """Return the kernel for the ONNX graph ``model`` on the CPU: :data:`NOT_NEEDED` if it has no node of our domain.

    Raises :class:`ConfigError` as :func:`usable_kernel` does.
    """
    parsed = parse_graph(model)
    functions = (function.node for function in parsed.functions if function.domain != DOMAIN)
    operators = {name for nodes in (parsed.graph.node, *functions) for name in _kernel_operators(nodes)}
    return usable_kernel(rounds=any(BF16 in name for name in operators)) if operators else NOT_NEEDED


def read_as_stored(model: Path | bytes | ModelProto, *, kernel: bool) -> frozenset[str]:
    """Return the initializers of the ONNX graph ``model`` that are read in place: never folded, widened or packed.

    These are bfloat16 weights of the library's operators if the ``kernel`` runs them, and bfloat16 and float32 tables
    of a ``Gather`` whose indices are not constant.
    """
    graph = parse_graph(model).graph
    constant = constant_values(graph)
    kernel_inputs, tables, other_inputs = set[str](), set[str](), {output.name for output in graph.output}
    for node in all_nodes(graph.node):
        for position, name in enumerate(node.input):
            is_table = (node.domain, node.op_type, position) == ("", "Gather", 0) and node.input[1] not in constant
            (kernel_inputs if node.domain == DOMAIN else tables if is_table else other_inputs).add(name)
    if not kernel:
        other_inputs |= kernel_inputs
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    bf16 = {name for name in kernel_inputs | tables if types.get(name) == BY_NAME["bfloat16"].onnx}
    fp32 = {name for name in tables - kernel_inputs if types.get(name) == BY_NAME["float32"].onnx}
    return frozenset((bf16 | fp32) - other_inputs)


def constant_values(graph: GraphProto) -> set[str]:
    """Return the names of values that are constant: ONNX Runtime may compute them when it opens a session."""
    found = {tensor.name for tensor in graph.initializer} - {edge.name for edge in graph.input}
    for node in graph.node:
        if found.issuperset(filter(None, node.input)):
            found.update(node.output)
    return found


def usable_kernel(*, rounds: bool = False) -> Kernel:
    """Return the kernel on this machine, from the environment as it is now.

    Raises :class:`ConfigError` as :func:`configured_kernel` does.
    """
    kernel = configured_kernel(rounds=rounds)
    error = _registration_error() if kernel.path else ""
    if error:
        return _no_kernel(f"this ONNX Runtime and its library do not fit ({error})", f"install {_ONNXRUNTIME}")
    return kernel


def multiplies_bf16() -> bool:
    """Return whether this machine has a path of its own, with bf16 instructions, for products that round activations.

    Other paths emulate such products, which then take as long as fp32 products, or longer.
    """
    path = usable_kernel(rounds=True).path
    return bool(path) and path != usable_kernel().path


def configured_kernel(*, rounds: bool = False) -> Kernel:
    """Return what :func:`usable_kernel` returns unless ONNX Runtime refuses the library; does not import ONNX Runtime.

    ``rounds``: the path for products that round their activations to bf16. ``avx512_bf16`` is only for those; for
    others it means ``avx512f``.

    Raises :class:`ConfigError` when ``BF16KIT_KERNEL_PATH`` names an unknown path, or one that this processor cannot
    run. A user who names a path does not want another one silently.
    """
    configured = os.environ.get(VARIABLE, "")
    if configured and configured not in (*PATHS, *OPT_IN, OFF):
        raise ConfigError(
            f"{VARIABLE} is {configured!r}; allowed are {', '.join((*PATHS, *OPT_IN))} and {OFF}; unset it for the"
            " fastest path that this processor runs"
        )
    if configured == OFF:
        return _no_kernel(f"it is switched off by {VARIABLE}={OFF}", f"unset {VARIABLE} to use it")
    if not LIBRARY.exists():
        return _no_kernel(_NOT_BUILT, _REINSTALL)
    try:
        library = ctypes.CDLL(str(LIBRARY))
        path_function = library.bf16kit_kernel_path_bf16 if rounds else library.bf16kit_kernel_path
    except (OSError, AttributeError) as error:  # built for another machine, damaged, or another library
        return _no_kernel(f"its library cannot be loaded ({error})", _REINSTALL)
    path_function.restype, path_function.argtypes = ctypes.c_char_p, ()
    path: bytes | None = path_function()
    if path is None:
        raise ConfigError(
            f"{VARIABLE} is {configured!r}, which this processor cannot run; name another of {', '.join(PATHS)}, or"
            " unset it for the fastest path that it runs"
        )
    return Kernel(path.decode())


def _no_kernel(reason: str, remedy: str) -> Kernel:
    return Kernel("", f"no CPU kernel, because {reason}", f"{_COST}; {remedy}")


def _registration_error() -> str:
    """Return why ONNX Runtime cannot register the library, "" when it can.

    The library checks the runtime's version and the result of a first call to it.
    """
    from bf16kit.runtime.ort.quietort import ort

    try:
        ort.SessionOptions().register_custom_ops_library(str(LIBRARY))
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no other base
        return str(error)
    return ""


def parse_graph(model: Path | bytes | ModelProto) -> ModelProto:
    """Parse the graph without its external data, unless the caller has.

    If it cannot be parsed the result is an empty graph: ONNX Runtime reports the error better.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        if isinstance(model, onnx.ModelProto):
            return model
        if isinstance(model, Path):
            return onnx.load(model, format="protobuf", load_external_data=False)
        return onnx.load_model_from_string(model, format="protobuf")
    except (OSError, DecodeError):
        return onnx.ModelProto()


def _kernel_operators(nodes: Iterable[NodeProto]) -> Iterator[str]:
    """Yield the library's operators among ``nodes`` and in their subgraphs."""
    return (node.op_type for node in all_nodes(nodes) if node.domain == DOMAIN)


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield ``nodes`` and the nodes of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from all_nodes(inner.node)


def read_in_place(path: Path) -> frozenset[str]:
    """Return the fp32 initializers of the graph in ``path`` that are read only as :data:`_READ_IN_PLACE` allows."""
    model = parse_graph(path)
    uses = defaultdict[str, set[tuple[str, int]]](set)
    for name, operator, position in _uses(model.graph, main=True):
        uses[name].add((operator, position))
    fp32 = [tensor.name for tensor in model.graph.initializer if tensor.data_type == BY_NAME["float32"].onnx]
    return frozenset(name for name in fp32 if uses[name] and uses[name] <= _READ_IN_PLACE)


def _uses(graph: GraphProto, *, main: bool) -> Iterator[tuple[str, str, int]]:
    """Yield each name that ``graph`` reads, with operator and input position.

    Reads in subgraphs or by other domains, and graph outputs, are yielded as :data:`_OTHER_USE`.
    """
    for output in graph.output:
        yield output.name, *_OTHER_USE
    for node in graph.node:
        known = main and node.domain in ("", "ai.onnx")
        for position, name in enumerate(node.input):
            yield (name, node.op_type, position) if known else (name, *_OTHER_USE)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _uses(inner, main=False)
