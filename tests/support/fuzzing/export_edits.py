"""Edits of torch.export archives: the program's JSON, the tables of tensors, and the other records."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from fuzzing import torch_edits
from fuzzing.torch_edits import Records

Edit = Callable[[Records, Random], None]

TARGETS = ("torch.os.system", "torch.ops.load_library", "torch.load", "torch.hub.load", "torch.ops.aten.from_file.default", "_operator.attrgetter",
           "torch.ops.aten.add.out", "torch.ops.aten.relu.default", "torch.ops.aten.sigmoid.default", "torch.ops.aten.view.default", "math.exp", "",
           "torch.ops.higher_order.cond", "torch.ops.higher_order.wrap_with_autocast", "torch.ops.aten.empty.memory_format", "_operator.add",
           "torch.ops.aten.as_strided.default", "torch.ops.aten.full.default", "torch.ops.aten.relu_.default", "torch.ops.aten.no_such.default")  # fmt: skip
VALUES: tuple[Any, ...] = (0, 1, -1, 2**31, 2**40, 2**62, 2**63, -(2**63), 2**70, 1e308, "x", "", "x); exit(", None, True, [], {}, [[]], {"as_none": True},
          {"as_int": 2**40}, {"as_ints": [2**40, 2**40]}, {"as_tensor": {"name": "x"}}, {"as_string": "touch executed"},
          {"as_operator": "torch.os.system"}, {"as_custom_obj": {"name": "x", "class_fqn": "y"}}, {"as_expr": {"expr_str": "open('executed','w')"}},
          {"as_sym_int": {"as_name": "x"}}, {"as_scalar_type": 13}, {"as_device": {"type": "cuda", "index": 0}}, "Infinity")  # fmt: skip
FILES = (
    "weight_0",
    "weight_1",
    "weight_99",
    "tensor_0",
    "opaque_obj_0",
    "custom_obj_0",
    "../../secret",
    "/etc/hostname",
    "",
)


class _Canary:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch executed",)


def _json(records: Records, ending: str) -> tuple[str, Any]:
    name = next((name for name in records if name.endswith(ending)), "")
    try:
        return name, json.loads(records[name])
    except (KeyError, ValueError, RecursionError):  # an earlier edit may have nested it too deeply
        return name, {}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value inside a JSON value, as its container and its key in that container."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def _replace(records: Records, ending: str, random: Random, value: Any) -> None:
    name, found = _json(records, ending)
    places = list(_places(found))
    if places:
        holder, key = random.choice(places)
        holder[key] = value
        records[name] = json.dumps(found).encode()


def program_value(records: Records, random: Random) -> None:
    """Replace a value of the program with an entry of VALUES."""
    _replace(records, "models/model.json", random, random.choice(VALUES))


def program_missing(records: Records, random: Random) -> None:
    """Remove a value of the program, or replace it with another part of the program."""
    name, found = _json(records, "models/model.json")
    places = list(_places(found))
    if places:
        holder, key = random.choice(places)
        other, at = random.choice(places)
        if random.random() < 0.5:
            del holder[key]
        else:
            holder[key] = json.loads(json.dumps(other.get(at) if isinstance(other, dict) else None))
        records[name] = json.dumps(found).encode()


def target(records: Records, random: Random) -> None:
    """Replace a node's operator, and with a chance of one half its arguments with a shell command."""
    name, found = _json(records, "models/model.json")
    nodes = [holder[key] for holder, key in _places(found) if isinstance(holder[key], dict) and "target" in holder[key]]
    if nodes:
        node = random.choice(nodes)
        node["target"] = random.choice(TARGETS)
        if random.random() < 0.5:
            node["inputs"] = [{"name": "", "arg": {"as_string": "touch executed"}, "kind": 1}]
        records[name] = json.dumps(found).encode()


def table(records: Records, random: Random) -> None:
    """Replace a part of a tensor's description: sizes, strides, offsets, dtypes, names of records."""
    ending = random.choice(("model_weights_config.json", "model_weights_config.json", "model_constants_config.json"))
    if random.random() < 0.3:
        name, found = _json(records, ending)
        entries = [entry for entry in found.get("config", {}).values() if isinstance(entry, dict)]
        if entries:
            random.choice(entries).update(path_name=random.choice(FILES), use_pickle=random.random() < 0.3)
            records[name] = json.dumps(found).encode()
        return
    _replace(records, ending, random, random.choice((*VALUES, {"as_int": random.randrange(200)})))


def pickles(records: Records, random: Random) -> None:
    """Add a pickle that runs a command, where torch's own loader would unpickle it."""
    body = pickle.dumps(_Canary())
    root = next(iter(records), "m/").partition("/")[0]
    records[f"{root}/data/{random.choice(('sample_inputs/model.pt', 'weights/model.pt', 'constants/model.pt'))}"] = body
    name, found = _json(records, "model_constants_config.json")
    meta = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    if random.random() < 0.5 and isinstance(found.get("config"), dict):
        found["config"]["extra"] = meta
        records[name], records[f"{root}/data/constants/opaque_obj_0"] = json.dumps(found).encode(), body


def code(records: Records, random: Random) -> None:
    """Add code where torch's own loader would evaluate it."""
    name, found = _json(records, "models/model.json")
    text = "__import__('os').system('touch executed')"
    if random.random() < 0.5:
        found["guards_code"] = [text]
    else:
        for holder, key in list(_places(found)):
            if key == "expr_str":
                holder[key] = text
    records[name] = json.dumps(found).encode()


def deep(records: Records, random: Random) -> None:
    """Replace a record with JSON that is nested 500, 20,000 or 1,000,000 levels deep."""
    name = random.choice([name for name in records if name.endswith(".json")] or ["m/x.json"])
    depth = random.choice((500, 20_000, 1_000_000))
    records[name] = random.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))


def more(records: Records, random: Random) -> None:
    """Add a record that belongs to other archives, or whose name leads out of the archive."""
    root = next(iter(records), "m/").partition("/")[0]
    name = random.choice(("models/other.json", "data/aotinductor/model/x.so", "../../secret", "extra/x", "serialized_exported_program.json",
                          "data/weights/weight_0/x", "é" * 100))  # fmt: skip
    records[f"{root}/{name}"] = random.choice((b"", b"{}", b"x" * 100))


EDITS: tuple[Edit, ...] = (
    program_value, program_value, program_value, program_missing, target, target, table, table, table, pickles, code, deep, more,
    torch_edits.missing, torch_edits.short, torch_edits.values,
)  # fmt: skip


def edit(content: bytes, random: Random) -> tuple[str, bytes]:
    """Return the names of the edits and the archive, rewritten after one or two edits or with false zip tables."""
    if random.random() < 0.1:
        return torch_edits.edit(content, random)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    names = []
    for _ in range(random.choice((1, 1, 2))):
        if not records:
            break
        chosen = random.choice(EDITS)
        names.append(chosen.__name__)
        chosen(records, random)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, record in records.items():
            archive.writestr(zipfile.ZipInfo(name), record)
    return "+".join(names), written.getvalue()
