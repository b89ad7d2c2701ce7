"""Recognises foreign zip archives and JSON documents by their contents."""

from __future__ import annotations

from collections.abc import Collection


def of_zip(names: Collection[str]) -> str | None:
    """Return the foreign format of an archive with records ``names``, given with and without their first directory."""
    records = [name for name in names if name]
    if records and all(name.endswith(".npy") for name in records):
        return "npz"
    if "bytecode.pkl" in names:  # in addition to TorchScript's records
        return "mobile"
    return None


def of_json(fields: object) -> str | None:
    """Return the foreign format of a JSON document, or None."""
    if not isinstance(fields, dict):
        return None
    if "weightsManifest" in fields or "modelTopology" in fields:
        return "tensorflow.js"
    if {"nodes", "arg_nodes", "heads"} <= fields.keys():
        return "mxnet graph"
    return None
