"""The part of TensorFlow's protocol buffers that is read; undeclared fields are preserved.

The numbers are those of tensorflow/core/protobuf (saved_model, meta_graph, saver, tensor_bundle,
trackable_object_graph) and tensorflow/core/framework (graph, node_def, function, attr_value, tensor_shape). Maps are
declared as entries, as they are on the wire; enums as integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# message → fields: name, number, type. "+" before a type: repeated.
_SCHEMA: dict[str, tuple[tuple[str, int, str], ...]] = {
    "SavedModel": (("meta_graphs", 2, "+MetaGraph"),),
    "MetaGraph": (
        ("info", 1, "Info"),
        ("graph", 2, "Graph"),
        ("saver", 3, "Saver"),
        ("collections", 4, "+bytes"),
        ("signatures", 5, "+SignatureEntry"),
        ("assets", 6, "+bytes"),
        ("objects", 7, "bytes"),
    ),
    "Info": (("tags", 4, "+string"), ("version", 5, "string")),
    "Saver": (("filename_tensor", 1, "string"), ("restore_op", 3, "string")),
    "SignatureEntry": (("key", 1, "string"), ("value", 2, "Signature")),
    "Signature": (("inputs", 1, "+InfoEntry"), ("outputs", 2, "+InfoEntry")),
    "InfoEntry": (("key", 1, "string"), ("value", 2, "TensorInfo")),
    "TensorInfo": (
        ("name", 1, "string"),
        ("dtype", 2, "int32"),
        ("shape", 3, "Shape"),
        ("sparse", 4, "bytes"),
        ("composite", 5, "bytes"),
    ),
    "Shape": (("dim", 2, "+Dim"), ("unknown_rank", 3, "bool")),
    "Dim": (("size", 1, "int64"),),
    "Graph": (("node", 1, "+Node"), ("library", 2, "Library")),
    "Library": (("function", 1, "+Function"),),
    "Function": (("signature", 1, "Named"), ("node", 3, "+Node")),
    "Named": (("name", 1, "string"),),
    "Node": (("name", 1, "string"), ("op", 2, "string"), ("input", 3, "+string"), ("attr", 5, "+AttrEntry")),
    "AttrEntry": (("key", 1, "string"), ("value", 2, "Attr")),
    "Attr": (("list", 1, "AttrList"), ("type", 6, "int32"), ("func", 10, "Call")),
    "AttrList": (("type", 6, "+int32"), ("func", 9, "+Call")),
    "Call": (("name", 1, "string"), ("attr", 2, "+AttrEntry")),
    "Objects": (("node", 1, "+Object"),),
    "Object": (("attribute", 2, "+Attribute"),),
    "Attribute": (("full_name", 2, "string"), ("key", 3, "string")),
    "BundleHeader": (("num_shards", 1, "int32"), ("endianness", 2, "int32")),
    "BundleEntry": (
        ("dtype", 1, "int32"),
        ("shape", 2, "Shape"),
        ("shard", 3, "int32"),
        ("offset", 4, "int64"),
        ("size", 5, "int64"),
        ("slices", 7, "+bytes"),
    ),
}

_PACKAGE = "bf16kit.tensorflow"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
}


def message(name: str) -> type[Any]:
    """Return the class of the message ``name``, which parses and serialises."""
    return _classes()[name]


@cache
def _classes() -> dict[str, type[Any]]:
    file = descriptor_pb2.FileDescriptorProto(name="bf16kit/tensorflow.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        declared = file.message_type.add(name=name)
        for field, number, kind in fields:
            declared.field.append(_declared(field, number, kind))
    pool = descriptor_pool.DescriptorPool()  # a separate pool: TensorFlow's messages have other names
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


def _declared(name: str, number: int, kind: str) -> descriptor_pb2.FieldDescriptorProto:
    label = _Field.LABEL_REPEATED if kind.startswith("+") else _Field.LABEL_OPTIONAL
    kind = kind.removeprefix("+")
    if kind in _SCALARS:
        return _Field(name=name, number=number, label=label, type=_SCALARS[kind])
    return _Field(name=name, number=number, label=label, type=_Field.TYPE_MESSAGE, type_name=f".{_PACKAGE}.{kind}")
