"""Foreign zip archives and JSON documents, told by what they hold."""

from __future__ import annotations

from collections.abc import Collection


def of_zip(names: Collection[str]) -> str | None:
    """The foreign format of an archive whose records are called ``names``, with and without their first directory."""
    records = [name for name in names if name]
    if records and all(name.endswith(".npy") for name in records):
        return "npz"
    if "bytecode.pkl" in names:  # beside the records that TorchScript has, too
        return "mobile"
    return None


def of_json(fields: object) -> str | None:
    """The foreign format of a JSON document."""
    if not isinstance(fields, dict):
        return None
    if "weightsManifest" in fields or "modelTopology" in fields:
        return "tensorflow.js"
    if {"nodes", "arg_nodes", "heads"} <= fields.keys():
        return "mxnet graph"
    return None
