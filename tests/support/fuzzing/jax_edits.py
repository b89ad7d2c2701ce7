"""Seeds and edits of JAX checkpoints: Flax's msgpack, rewritten with false contents, and Orbax's JSON."""

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import flaxfiles
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fuzzing.json_edits import change, rewritten
from fuzzing.seed import Seed, mlp_weights

Bits = tuple[str, tuple[int, ...], bytes]

_RULES = str(Path(__file__).with_name("mlp_rules.yaml"))
_ARGUMENTS = ("--model", "architectures:Mlp", "--map", _RULES, "--input", "x:float32:batch,16")
_SHAPES: tuple[Any, ...] = ([], [0], [-1], [2**32, 2**32], [64, 16], [1024], [16, 64, 1], [2**62, 4], [1] * 40, ["64"], None, 7, [2**63 - 1], [1.5], [16, 65])  # fmt: skip
_DTYPES = ("float32", "float64", "bfloat16", "int8", "object", "complex64", "float8_e4m3fn", "", "<f4", None, 7, "V4", "string", "bool", "M8[s]")  # fmt: skip
_KEYS = ("", "params", "kernel", "a.b", "a\x00b", "../x", "x" * 300, "\x1b[31m", "value", "__metadata__", "opt_state", "ünï", "__msgpack_chunked_array__")  # fmt: skip
_NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 16, 64, 2**20, 2**31, 2**40, 2**62, 2**63, 2**64, 0.5, "3", None, True, [], {},
)  # fmt: skip
_TEXTS = ("zstd", "gzip", "blosc", "lzma", "bytes", "crc32c", "sharding_indexed", "transpose", "float32", "bfloat16", "<f8", "|u1", "float64",
          "../../secret", "file:///etc/hostname", "gs://bucket/x", "regular", "group", "jax.Array", "string", "None", "", "\x00", "é" * 50, "w" * 400)  # fmt: skip


def tree() -> dict[str, Any]:
    """Return ``architectures.Mlp`` as a Flax tree, with the other entries of a training state."""
    weights = mlp_weights()
    layers = {
        name: {"kernel": np.ascontiguousarray(weights[f"{name}.weight"].T), "bias": weights[f"{name}.bias"]}
        for name in ("up", "down")
    }
    return {"params": layers, "step": np.array(7, np.int64), "opt_state": {"0": {"mu": np.zeros(4, np.float32)}}}


def _leaves(part: Any, prefix: str = "") -> dict[str, NDArray[Any]]:
    if isinstance(part, np.ndarray):
        return {prefix: part}
    return {n: a for key, item in part.items() for n, a in _leaves(item, f"{prefix}.{key}" if prefix else key).items()}


def flax_seeds() -> tuple[Seed, ...]:
    half = {k: {n: a.astype(ml_dtypes.bfloat16) for n, a in v.items()} for k, v in tree()["params"].items()}
    parted = {k: {n: flaxfiles.chunked(a, 3) for n, a in v.items()} for k, v in tree()["params"].items()}
    trees = {"plain": tree(), "bf16": {"params": half}, "parted": {"params": parted}}
    return tuple(Seed(n, "flax", "m.msgpack", {"m.msgpack": flaxfiles.packed(t)}, _ARGUMENTS) for n, t in trees.items())


def orbax_seeds() -> tuple[Seed, ...]:
    """Return the Orbax seeds. A separate process writes them: tensorstore's threads would not survive a later fork."""
    with tempfile.TemporaryDirectory() as directory:
        program = "import sys; from fuzzing import jax_edits; jax_edits.write_orbax(sys.argv[1])"
        subprocess.run([sys.executable, "-c", program, directory], check=True)
        return tuple(_orbax_seed(path) for path in sorted(Path(directory).iterdir()))


def _orbax_seed(path: Path) -> Seed:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    contents = {f"item/{file.relative_to(path)}": file.read_bytes() for file in files}
    return Seed(path.name, "orbax", "item", contents, _ARGUMENTS)


def write_orbax(directory: str) -> None:
    """Write an item in each layout below ``directory``."""
    import orbaxfiles

    for ocdbt in (True, False):
        for driver in ("zarr", "zarr3"):
            name = f"{'ocdbt' if ocdbt else 'folders'}_{driver}"
            chunks = {"params.up.kernel": (8, 32)}
            orbaxfiles.write(Path(directory) / name, _leaves(tree()), ocdbt=ocdbt, driver=driver, chunks=chunks)


def edit_flax(content: bytes, random: Random) -> tuple[str, bytes]:
    """Return the edit's name and a file, rewritten with one array or key replaced."""
    given = tree()
    layer = given["params"][random.choice(("up", "down"))]
    name = random.choice(("kernel", "bias"))
    what = random.randrange(5)
    if what == 0:
        layer[random.choice(_KEYS)] = layer.pop(name)
        return "key", flaxfiles.packed(given)
    if what == 1:
        special = random.choice((np.nan, np.inf, -np.inf, 3.4028235e38, 1e-40, -0.0))
        layer[name] = layer[name].copy()
        layer[name].reshape(-1)[random.randrange(layer[name].size)] = special
        return "value", flaxfiles.packed(given)
    if what == 2:
        given["params"]["extra"] = {"w": np.ones(random.choice((1, 3, 64)), np.float32)}
        return "more", flaxfiles.packed(given)
    if what == 3:
        parted = flaxfiles.chunked(layer[name], random.choice((1, 2, 5)))
        parted[random.choice(list(parted))] = random.choice((None, {}, {"0": 3}, {"1": layer[name]}, [layer[name]], 7))
        layer[name] = parted
        return "parts", flaxfiles.packed(given)
    return "array", _with_array(flaxfiles.packed(given), flaxfiles.array(layer[name]), random)


def _with_array(content: bytes, own: bytes, random: Random) -> bytes:
    """Replace the array ``own`` in ``content`` with another description; its extension length may be wrong."""
    shape, dtype = random.choice(_SHAPES), random.choice(_DTYPES)
    data = random.choice((b"", bytes(16), bytes(4096), bytes(4097)))
    made = flaxfiles.packed(
        random.choice(
            ([shape, dtype, data], [shape, "float32", data], [[16, 64], dtype, bytes(4096)], [shape, dtype], [])
        )
    )
    length = len(made) if random.random() < 0.8 else random.choice((0, 1, 2**31, 2**32 - 1, len(own)))
    old = len(own).to_bytes(4, "big") + b"\x01" + own
    kind = bytes([random.choice((1, 1, 1, 2, 3, 4, 127, 255))])
    return content.replace(old, length.to_bytes(4, "big") + kind + made, 1)


def edit_json(content: bytes, random: Random) -> tuple[str, bytes]:
    """Return the names of the edits and the Orbax or zarr metadata after one or two edits at random places."""
    if random.random() < 0.05:
        return rewritten(content, random)
    fields = json.loads(content)
    values = random.choice((_NUMBERS, _TEXTS))
    done = [change(fields, values, _KEYS, random) for _ in range(random.choice((1, 1, 2)))]
    return "+".join(done), json.dumps(fields).encode()


def of_flax(source: Path) -> Iterator[Bits]:
    """Yield the arrays as a second msgpack reader finds them: the one vendored in pip."""
    msgpack: Any = importlib.import_module("pip._vendor.msgpack")

    def unpacked(code: int, data: bytes) -> Any:
        if code == 2:
            return None
        shape, dtype, content = msgpack.unpackb(data, raw=False, use_list=True)
        assert code in (1, 3)
        return np.frombuffer(content, np.dtype(dtype)).reshape(shape)

    found = msgpack.unpackb(source.read_bytes(), ext_hook=unpacked, raw=False, strict_map_key=True)
    for name, array in _walk(found, ""):
        if not name.startswith("opt_state."):
            yield array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes()


def _walk(part: Any, name: str) -> Iterator[tuple[str, NDArray[Any]]]:
    if isinstance(part, dict) and "__msgpack_chunked_array__" in part:
        shape = [part["shape"][str(axis)] for axis in range(len(part["shape"]))]
        yield name, np.concatenate([part["chunks"][str(i)] for i in range(len(part["chunks"]))]).reshape(shape)
    elif isinstance(part, dict | list):
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, item in items:
            yield from _walk(item, f"{name}.{key}" if name else str(key))
    elif isinstance(part, bool | int | float):
        yield name, np.array(part)
    elif isinstance(part, np.ndarray):
        yield name, part


def of_orbax(item: Path) -> Iterator[Bits]:
    """Yield the arrays that ``_METADATA`` lists, as tensorstore reads them."""
    import tensorstore

    metadata = json.loads((item / "_METADATA").read_bytes())
    for leaf in metadata["tree_metadata"].values():
        name = ".".join(str(key["key"]) for key in leaf["key_metadata"])
        if leaf["value_metadata"].get("skip_deserialize") or leaf["value_metadata"]["value_type"] in ("string", "None"):
            continue
        if name.startswith("opt_state."):
            continue
        store: dict[str, Any] = {"driver": "file", "path": f"{item}/{name}/"}
        if (item / "manifest.ocdbt").exists():
            store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}, "path": f"{name}/"}
        try:
            opened = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()
        except ValueError:
            opened = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()
        array = opened.read().result()
        yield array.dtype.name, array.shape, array.tobytes()
