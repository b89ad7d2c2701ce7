"""What an ONNX graph tells before a session is opened: which files, kernel and memory it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import ArtifactError, RuntimeFailure
from bf16kit.numerics.tensors import BY_NAME
from bf16kit.runtime.ort.kernel import BF16, DOMAIN, NOT_NEEDED, Kernel, usable_kernel

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import GraphProto, ModelProto, TensorProto

# The external data file of reference.onnx. It does not exist: its weights are rebuilt from bf16 and the residual.
REBUILT = "residual.rebuilt"


def check_locations(path: Path, allowed: Collection[str]) -> ModelProto:
    """Return the graph in ``path``; ArtifactError if one of its tensors is in a file that is not ``allowed``.

    These are files beside the graph. Whether a tensor lies within its file is for whoever reads it to check. Raises
    :class:`RuntimeFailure` when ``path`` is not an ONNX file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except (OSError, DecodeError) as error:
        raise RuntimeFailure(f"{path.name} is not an ONNX file: {error}") from error
    for tensor in all_tensors(model):
        for location in locations(tensor):
            if location not in allowed:
                raise ArtifactError(
                    f"{path}: tensor {tensor.name!r} keeps its data in {location!r},"
                    " which is not a file of this artifact"
                )
    return model


def all_tensors(message: Message) -> Iterator[TensorProto]:
    """Yield every tensor in ``message``: initializers, dense or sparse, and attributes, at any depth."""
    return messages(message, "TensorProto")


def locations(tensor: TensorProto) -> list[str]:
    """Return the files that ``tensor`` names: none if it is in the graph, exactly one if it follows the format."""
    return [entry.value for entry in tensor.external_data if entry.key == "location"]


def kernel_for(model: Path | bytes | ModelProto) -> Kernel:
    """Return the kernel for the ONNX graph ``model`` on the CPU: :data:`NOT_NEEDED` if it has no node of our domain.

    Raises :class:`ConfigError` as :func:`~bf16kit.runtime.ort.kernel.configured_kernel` does.
    """
    model = parsed(model)
    used = (model.graph, *(function for function in model.functions if function.domain != DOMAIN))
    ours = {node.op_type for part in used for node in messages(part, "NodeProto") if node.domain == DOMAIN}
    if not ours:
        return NOT_NEEDED
    return replace(usable_kernel(rounds=any(BF16 in name for name in ours)), operators=tuple(sorted(ours)))


def read_in_place(model: ModelProto, *, kernel: bool = False, products: bool = False) -> set[str]:
    """Return the initializers of the ONNX graph ``model`` that are only read in place: never folded, widened or packed.

    These are tables of a ``Gather`` whose indices are not constant, in bfloat16 or float32; with ``kernel``, bfloat16
    weights of the library's operators, if it runs them; with ``products``, float32 weights of ``MatMul`` and ``Gemm``
    in a session that packs none. ``Conv`` is not among them: its weights are rearranged when a session is opened.
    """
    constant = _constant_values(model.graph)
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
        for inner in messages(node, "GraphProto"):  # in a subgraph, the name may stand for another tensor
            others.update(output.name for output in inner.output)
            others.update(name for each in inner.node for name in each.input)
    return found - others


def _constant_values(graph: GraphProto) -> set[str]:
    """Return the names of values that are constant: ONNX Runtime may compute them when it opens a session."""
    found = {tensor.name for tensor in graph.initializer} - {edge.name for edge in graph.input}
    for node in graph.node:
        if found.issuperset(filter(None, node.input)):
            found.update(node.output)
    return found


def parsed(model: Path | bytes | ModelProto) -> ModelProto:
    """Parse the graph, unless the caller has. What is no graph is an empty one: ONNX Runtime reports that better."""
    import onnx
    from google.protobuf.message import DecodeError

    if isinstance(model, onnx.ModelProto):
        return model
    with contextlib.suppress(OSError, DecodeError):
        return onnx.load_model_from_string(model if isinstance(model, bytes) else model.read_bytes())
    return onnx.ModelProto()


def messages(message: Message, kind: str) -> Iterator[Any]:
    """Yield the messages of type ``kind`` in ``message``, itself included: in subgraphs and functions, too."""
    name = message.DESCRIPTOR.name
    if name == kind:
        yield message
    if name in ("TensorProto", "ValueInfoProto"):  # of a tensor, gigabytes might be copied
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in value if descriptor.is_repeated else (value,):
                yield from messages(inner, kind)
