"""Our protocol file equals Triton's own, as tritonclient ships it: the number, type and name of each field."""

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from bf16kit.protocol import inference_pb2 as pb

#: Fields of the Open Inference Protocol that Triton's file does not have.
OIP_ONLY = {("ModelMetadataResponse", "properties")}


def theirs(name: str) -> Descriptor:
    for module in (service_pb2, model_config_pb2):
        if name in module.DESCRIPTOR.message_types_by_name:
            found: Descriptor = module.DESCRIPTOR.message_types_by_name[name]
            return found
    raise AssertionError(f"Triton has no message {name}")


def kind(field: FieldDescriptor) -> tuple[object, ...]:
    refers_to = field.message_type or field.enum_type
    return (field.number, field.type, field.is_repeated, refers_to.name if refers_to else "")


def compare(ours: Descriptor, triton: Descriptor) -> None:
    for field in ours.fields:
        if (ours.name, field.name) not in OIP_ONLY:
            assert kind(field) == kind(triton.fields_by_name[field.name]), f"{ours.name}.{field.name}"
    for nested in ours.nested_types:
        if nested.name in triton.nested_types_by_name:
            compare(nested, triton.nested_types_by_name[nested.name])


def test_every_message_field_has_tritons_number_and_type() -> None:
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        compare(message, theirs(name))


def test_every_enum_value_has_tritons_number() -> None:
    ours = pb.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    triton = model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    assert {name: value.number for name, value in ours.items()} == {n: v.number for n, v in triton.items()}


def test_every_rpc_has_tritons_messages() -> None:
    ours = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    triton = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for method in ours:
        known = triton[method.name]
        assert (method.input_type.name, method.output_type.name) == (known.input_type.name, known.output_type.name)
        assert (method.client_streaming, method.server_streaming) == (known.client_streaming, known.server_streaming)
