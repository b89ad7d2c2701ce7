"""Directories in Orbax's layouts, written with tensorstore alone, as far as the converter reads them.

``tests/sources/test_jax.py`` tests directories that Orbax wrote.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Driver = Literal["zarr", "zarr3"]


def write(
    item: Path,
    leaves: Mapping[str, NDArray[Any]],
    *,
    ocdbt: bool = True,
    driver: Driver = "zarr",
    chunks: Mapping[str, tuple[int, ...]] | None = None,
    metadata: bool = True,
) -> Path:
    """Write an item with ``leaves``. A leaf is one chunk, or has chunks of the shape that ``chunks`` gives for it."""
    import tensorstore

    item.mkdir(parents=True, exist_ok=True)
    files = {"driver": "file", "path": f"{item}/"}
    for name, array in leaves.items():
        chunk = list((chunks or {}).get(name, array.shape))
        config = {"max_inline_value_bytes": 1024, "manifest_kind": "single"}
        store: dict[str, Any] = {"driver": "ocdbt", "base": files, "path": f"{name}/", "config": config}
        if not ocdbt:
            store = {"driver": "file", "path": f"{item}/{name}/"}
        spec = {"driver": driver, "kvstore": store, "store_data_equal_to_fill_value": True}
        spec["metadata"] = _zarr2(array, chunk) if driver == "zarr" else _zarr3(array, chunk)
        opened = tensorstore.open(spec, create=True, open=True, dtype=array.dtype.name).result()
        opened.write(array).result()
    if metadata:
        (item / "_METADATA").write_text(json.dumps(described(leaves, ocdbt=ocdbt, driver=driver)))
    return item


def described(leaves: Mapping[str, NDArray[Any]], *, ocdbt: bool = True, driver: Driver = "zarr") -> dict[str, Any]:
    """Return the contents of ``_METADATA`` for ``leaves``."""
    return {
        "tree_metadata": {str(tuple(name.split("."))): entry(name) for name in leaves},
        "use_ocdbt": ocdbt,
        "use_zarr3": driver == "zarr3",
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def entry(name: str, **value: Any) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key, "key_type": 2} for key in name.split(".")],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False} | value,
    }


def _zarr2(array: NDArray[Any], chunk: list[int]) -> dict[str, Any]:
    return {"shape": list(array.shape), "chunks": [max(1, n) for n in chunk], "compressor": {"id": "zstd", "level": 1}}


def _zarr3(array: NDArray[Any], chunk: list[int]) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    shards = {
        "chunk_shape": [max(1, n) for n in chunk],
        "codecs": [little, {"name": "zstd"}],
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "shape": list(array.shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in chunk]}},
        "codecs": [{"name": "sharding_indexed", "configuration": shards}],
    }


def values(count: int = 12) -> NDArray[np.float32]:
    """Return random values, which compress badly."""
    return np.random.default_rng(count).standard_normal(count).astype(np.float32)
