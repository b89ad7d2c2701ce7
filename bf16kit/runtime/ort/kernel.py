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

import contextlib
import ctypes
import os
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
    found = (node for nodes in (parsed.graph.node, *functions) for node in all_nodes(nodes))
    operators = {node.op_type for node in found if node.domain == DOMAIN}
    return usable_kernel(rounds=any(BF16 in name for name in operators)) if operators else NOT_NEEDED


def read_in_place(model: ModelProto, *, kernel: bool = False, products: bool = False) -> set[str]:
    """Return the initializers of the ONNX graph ``model`` that are only read in place: never folded, widened or packed.

    These are tables of a ``Gather`` whose indices are not constant, in bfloat16 or float32; with ``kernel``, bfloat16
    weights of the library's operators, if it runs them; with ``products``, float32 weights of ``MatMul`` and ``Gemm``
    in a session that packs none. ``Conv`` is not among them: its weights are rearranged when a session is opened.
    """
    constant = constant_values(model.graph)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    bf16, fp32 = BY_NAME["bfloat16"].onnx, BY_NAME["float32"].onnx
    found, others = set[str](), {output.name for output in model.graph.output}
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            dtype, reader = types.get(name), (node.op_type, position)
            if node.domain == DOMAIN:
                in_place = kernel and dtype == bf16
            elif reader == ("Gather", 0):
                in_place = dtype in (bf16, fp32) and node.input[1] not in constant
            else:
                in_place = products and dtype == fp32 and reader in (("MatMul", 1), ("Gemm", 1))
            (found if in_place and node.domain in ("", "ai.onnx", DOMAIN) else others).add(name)
        others.update(_read_inside(node))
    return found - others


def _read_inside(node: NodeProto) -> Iterator[str]:
    """Yield the names that the subgraphs of ``node`` read or give as outputs."""
    for graph in _subgraphs(node):
        yield from (output.name for output in graph.output)
        for inner in graph.node:
            yield from (*inner.input, *_read_inside(inner))


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
    if kernel.path:
        from bf16kit.runtime.ort.session import ort

        try:  # the library checks the runtime's version and the result of a first call to it
            ort.SessionOptions().register_custom_ops_library(str(LIBRARY))
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no other base
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


def parse_graph(model: Path | bytes | ModelProto) -> ModelProto:
    """Parse the graph without its external data, unless the caller has.

    If it cannot be parsed the result is an empty graph: ONNX Runtime reports the error better.
    """
    import onnx
    from google.protobuf.message import DecodeError

    if isinstance(model, onnx.ModelProto):
        return model
    with contextlib.suppress(OSError, DecodeError):
        return onnx.load_model_from_string(model if isinstance(model, bytes) else model.read_bytes())
    return onnx.ModelProto()


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield ``nodes`` and the nodes of their subgraphs."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from all_nodes(graph.node)


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)
