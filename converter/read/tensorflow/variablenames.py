"""Names of variables: those that their layers gave them, if a checkpoint records them.

A TensorFlow 2 checkpoint has a key for each way in which a program refers to a variable (``variables/3``,
``_all_variables/14``), with the same bytes under each, and an entry that records the variable's name
(``batch_normalization/gamma``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.graph.equality import same_bits
from converter.read.tensorflow import sstable
from converter.read.tensorflow.messages import message
from converter.source import Array

OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"  # ends the key of every variable that TensorFlow 2 saves


def full_names(stored: bytes) -> dict[str, str]:
    """Return the names by key from ``stored``, the bytes of the entry :data:`OBJECTS`.

    A string is stored as its length, a checksum of the length, and the text. Raises :class:`sstable.Damaged`.
    """
    from google.protobuf.message import DecodeError

    length, position = sstable.varint(stored, 0)
    text = stored[position + 4 :]
    if length != len(text):
        raise sstable.Damaged(f"{OBJECTS} is {len(text)} bytes, but claims {length}")
    objects: Any = message("Objects")()
    try:
        objects.ParseFromString(text)
    except DecodeError:
        raise sstable.Damaged(f"{OBJECTS} cannot be read") from None
    return {found.key: found.full_name for node in objects.node for found in node.attribute if found.full_name}


def named(tensors: Mapping[str, Array], full: Mapping[str, str]) -> dict[str, Array]:
    """Return ``tensors``, which are by key, by name; tensors with the same full name and the same bits become one.

    If two tensors with one name differ, or a name is another tensor's key, the key without :data:`SUFFIX` is the name.
    """
    groups: dict[str, list[str]] = {}
    for key in tensors:
        groups.setdefault(full.get(key, ""), []).append(key)
    keys = {short(key, tensors) for key in tensors}
    names: dict[str, Array] = {}
    for name, group in groups.items():
        if name and name not in keys and all(same_bits(tensors[group[0]], tensors[key]) for key in group[1:]):
            names[name] = tensors[group[0]]
        else:
            names.update({short(key, tensors): tensors[key] for key in group})
    return dict(sorted(names.items()))  # the order of keys changes between exports of the same model


def short(key: str, keys: Mapping[str, object]) -> str:
    """Return ``key`` without :data:`SUFFIX`, unless that is another key."""
    name = key.removesuffix(SUFFIX)
    return name if name and name not in keys else key
