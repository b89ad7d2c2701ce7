"""Writes Flax's msgpack files without flax: the few types that ``flax.serialization.to_bytes`` uses."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MLP_RULES = Path(__file__).with_name("fuzzing") / "mlp_rules.yaml"  # for :func:`mlp_params` in ``architectures.Mlp``


def mlp_params() -> dict[str, dict[str, NDArray[Any]]]:
    """Return the weights of ``architectures.Mlp`` as Flax stores them: kernels are [in, out]."""
    from architectures import Mlp, seeded  # and so torch, which the fuzzer of ONNX files does without

    state = {name: tensor.numpy() for name, tensor in seeded(Mlp()).state_dict().items()}
    return {
        name: {"kernel": np.ascontiguousarray(state[f"{name}.weight"].T), "bias": state[f"{name}.bias"]}
        for name in ("up", "down")
    }


def packed(value: Any) -> bytes:
    """Return ``value``, a tree of mappings, sequences, arrays, numbers, texts and None, as Flax packs it."""
    import msgpack

    return bytes(msgpack.packb(value, default=lambda own: msgpack.ExtType(1, array(own))))


def array(value: NDArray[Any]) -> bytes:
    """Return the content of an array's extension: its shape, the name of its dtype, its bytes."""
    return packed([list(value.shape), value.dtype.name, value.tobytes()])


def extension(kind: int, data: bytes) -> bytes:
    import msgpack

    return packed(msgpack.ExtType(kind, data))


def chunked(value: NDArray[Any], count: int) -> dict[str, Any]:
    """Return an array in ``count`` chunks, as Flax splits arrays of more than 2**30 bytes."""
    parts = np.array_split(value.reshape(-1), count)
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(axis): size for axis, size in enumerate(value.shape)},
        "chunks": {str(index): part for index, part in enumerate(parts)},
    }
