"""The codec of one loaded model: decodes its requests and encodes its responses. It is built once per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bf16kit.messages.errors import InvalidRequest, Unsupported
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import BY_NAME, BY_OIP, DType, check_feeds, describe
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.contract import Model
from bf16kit.service.operations import Regions, RegionSlice
from bf16kit.service.request import PRECISIONS, Cancellation, Precision, Reply, Request
from bf16kit.service.wire.limits import BoundsCheck, Reserve, item_size
from bf16kit.service.wire.parameters import RegionPlace, class_count, output_datatype, region_place
from bf16kit.service.wire.tensors import (
    Array,
    decode_contents,
    decode_raw,
    encode_raw,
    packed,
    top_classes,
    widen,
    wire_dtype,
)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Access to shared memory. ``regions`` is None if it is off; ``max_bytes`` limits one request's inputs."""

    regions: Regions | None = None
    max_bytes: int = 64 << 20

    def lease(self, what: str, place: RegionPlace) -> RegionSlice:
        """Return the bytes of ``what`` (an input or output, as messages name it).

        Raises InvalidRequest or NotFound; Unsupported if shared memory is off.
        """
        if self.regions is None:
            raise Unsupported(f"{what} is in shared memory, which is off; send it in the request")
        return self.regions.lease(*place)

    def check_size(self, nbytes: int) -> None:
        """Raise InvalidRequest if ``nbytes``, those of a request's inputs in shared memory so far, are too many."""
        if nbytes > self.max_bytes:
            raise InvalidRequest(
                f"the inputs have {nbytes} bytes or more in shared memory, expected at most {self.max_bytes}"
                " (max_message_bytes, the largest request)"
            )


@dataclass(frozen=True, slots=True)
class Sink:
    """The place in shared memory for one output."""

    place: RegionPlace
    slice: RegionSlice

    def fill(self, output: pb.ModelInferResponse.InferOutputTensor, data: Array) -> None:
        """Write the output, and describe its place in the response as Triton does."""
        self.slice.write(data)
        output.parameters["shared_memory_region"].string_param = self.place.region
        output.parameters["shared_memory_byte_size"].int64_param = self.place.byte_size
        if self.place.offset:
            output.parameters["shared_memory_offset"].int64_param = self.place.offset


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How to return the outputs of one request, by name; ``dtypes`` is in the order of the response.

    ``sinks`` has the outputs that go into shared memory. ``classes`` has the number of classes of outputs returned as
    BYTES.
    """

    dtypes: Mapping[str, DType]
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)


class InferenceCodec:
    """Turns ``ModelInferRequest`` into :class:`Request` and :class:`Reply` into ``ModelInferResponse`` for one model.

    It keeps the model's specs but not the model: a codec must not keep an unloaded model alive.
    """

    def __init__(self, model: Model, memory: SharedMemory = SharedMemory()) -> None:
        self._heads = {precision: _head(model, precision) for precision in PRECISIONS}
        self._specs = model.inputs
        self._inputs = {spec.name: (spec, BY_NAME[spec.dtype]) for spec in model.inputs}
        self._outputs: Mapping[str, DType] = {spec.name: BY_NAME[spec.dtype] for spec in model.outputs}
        self._all_outputs = OutputOptions(self._outputs)
        self._memory = memory
        self._batch_axis = model.batch_axis
        self._max_rows = model.max_batch_size
        self._rows_first = model.max_batch_size > 0 and model.batch_axis == 0
        self._labels = model.semantics.labels
        self._bounds = BoundsCheck(model)

    def decode(
        self,
        message: pb.ModelInferRequest,
        deadline: float | None = None,
        cancellation: Cancellation | None = None,
        reserve: Reserve | None = None,
    ) -> tuple[Request, OutputOptions]:
        """Return the checked request in ``message``, and how to return its outputs. ``deadline``: monotonic seconds.

        ``reserve`` is called with the size of what is about to be read from shared memory. Raises
        :class:`InvalidRequest` naming the input, what came and what was expected.
        """
        output_options, wanted = self._all_outputs, None
        if message.outputs:
            output_options = self._output_options(message.outputs)
            wanted = tuple(output_options.dtypes)
        feeds = self._feeds(message, reserve)
        sizes = check_feeds(self._specs, feeds)
        rows = self._rows(feeds)
        self._bounds.check_request(sizes, output_options.dtypes)
        return Request(feeds, rows, wanted, deadline, cancellation), output_options

    def encode(
        self, request_id: str, reply: Reply, output_options: OutputOptions, reserve: Reserve | None = None
    ) -> pb.ModelInferResponse:
        """Return the response: outputs in the order of ``reply``, each in ``raw_output_contents``.

        The raw entry of an output in shared memory is empty. The parameter ``precision`` says what made the outputs:
        bf16 or fp32. ``reserve`` is called with the response's size before it is encoded, and may raise. Raises
        :class:`InvalidRequest` if the response is larger than the model's limit.
        """
        dtypes, sinks, made = output_options.dtypes, output_options.sinks, reply.outputs
        for name, count in output_options.classes.items():
            labels = self._labels.get(name, ())
            made = {**made, name: top_classes(name, made[name], count, batched=self._rows_first, labels=labels)}
        nbytes = sum(array.size * item_size(dtypes[name]) for name, array in made.items())
        self._bounds.check_response(nbytes)
        if reserve is not None:
            reserve(nbytes)
        response = pb.ModelInferResponse.FromString(self._heads[reply.reported_precision])
        if request_id:
            response.id = request_id
        outputs, raw = response.outputs, response.raw_output_contents
        for name, array in made.items():
            dtype = dtypes[name]
            output = outputs.add(name=name, datatype=dtype.oip, shape=array.shape)
            if sinks and name in sinks:
                sinks[name].fill(output, packed(dtype, array))
                raw.append(b"")
            else:
                raw.append(encode_raw(dtype, array))
        return response

    def _feeds(self, message: pb.ModelInferRequest, reserve: Reserve | None) -> dict[str, Array]:
        inputs, raw = message.inputs[:], message.raw_input_contents[:]  # lists: iterating over protobuf's own is slow
        self._check_names(inputs)
        if raw and len(raw) != len(inputs):
            _check_entries(message)
        feeds: dict[str, Array] = {}
        used = shared = 0
        for tensor in inputs:
            name = tensor.name
            dtype, model_dtype, shape = self._wire_type(tensor)
            data: bytes | None = None
            if tensor.parameters and (place := region_place(f"input {name!r}", tensor.parameters)) is not None:
                shared += place.byte_size
                self._memory.check_size(shared)
                lease = self._memory.lease(f"input {name!r}", place)
                if reserve is not None:
                    reserve(place.byte_size)  # before it is copied
                data = lease.read()
            elif raw:
                data = raw[used]
                used += 1
            if data is None:
                array = decode_contents(name, dtype, shape, tensor.contents)
            elif tensor.HasField("contents") and tensor.contents.ListFields():  # MLServer's clients send them empty
                raise InvalidRequest(f"input {name!r} has contents beside raw_input_contents or shared memory; use one")
            else:
                array = decode_raw(name, dtype, shape, data)
            feeds[name] = array if dtype is model_dtype else widen(array)
        if raw and used != len(raw):
            _check_entries(message)
        return feeds

    def _check_names(self, inputs: Sequence[pb.ModelInferRequest.InferInputTensor]) -> None:
        """Raise InvalidRequest for the first name that is unknown or came before: few of a million are looked at."""
        missing = set(self._inputs)
        for name in (tensor.name for tensor in inputs):
            if name not in self._inputs:
                raise InvalidRequest(f"unknown input {quoted(name)}; the model's inputs are {', '.join(self._inputs)}")
            if name not in missing:
                raise InvalidRequest(f"input {name!r} was sent twice")
            missing.remove(name)

    def _wire_type(self, tensor: pb.ModelInferRequest.InferInputTensor) -> tuple[DType, DType, tuple[int, ...]]:
        """Return the datatype in which an input came, the model's own, and its shape."""
        name = tensor.name
        spec, model_dtype = self._inputs[name]
        dims = tensor.shape
        if len(dims) != len(spec.shape):  # before sizes are multiplied: a message can hold a million dimensions
            raise InvalidRequest(f"input {name!r} is of rank {len(dims)}, expected {describe(spec.shape)}")
        shape = tuple(dims[:])
        if 0 in shape:
            self._bounds.check_empty(name, shape)
        return wire_dtype(spec, model_dtype, tensor.datatype), model_dtype, shape

    def _rows(self, feeds: dict[str, Array]) -> int:
        axis = self._batch_axis
        if axis is None:
            return 1
        name, array = next(iter(feeds.items()))
        rows: int = array.shape[axis]
        if rows > self._max_rows > 0:
            raise InvalidRequest(
                f"input {name!r} has {rows} rows, expected at most {self._max_rows} (the model's max_batch_size)"
            )
        return rows

    def _output_options(self, outputs: Sequence[pb.ModelInferRequest.InferRequestedOutputTensor]) -> OutputOptions:
        """Return the requested outputs in their order, and how to return each."""
        dtypes: dict[str, DType] = {}
        sinks: dict[str, Sink] = {}
        classes: dict[str, int] = {}
        for output in outputs:
            name = output.name
            native = self._outputs.get(name)
            if native is None:
                raise InvalidRequest(
                    f"unknown output {quoted(name)}; the model's outputs are {', '.join(self._outputs)}"
                )
            if name in dtypes:
                raise InvalidRequest(f"output {name!r} was requested twice")
            dtypes[name] = native
            if not output.parameters:
                continue
            dtypes[name] = BY_OIP[output_datatype(name, native.oip, output.parameters)]
            if count := class_count(name, output.parameters):
                if native.oip in ("BYTES", "BOOL"):
                    raise InvalidRequest(f"output {name!r} is {native.oip}; only outputs of numbers have classes")
                classes[name], dtypes[name] = count, BY_OIP["BYTES"]
            place = region_place(f"output {name!r}", output.parameters)
            if place is not None:
                sinks[name] = Sink(place, self._memory.lease(f"output {name!r}", place))
        return OutputOptions(dtypes, sinks, classes)


def _head(model: Model, precision: Precision) -> bytes:
    """Return the encoded beginning of all responses of one precision: parsing it is cheaper than building it."""
    head = pb.ModelInferResponse(model_name=model.name, model_version=str(model.version))
    head.parameters["precision"].string_param = precision
    return head.SerializeToString()


def _check_entries(message: pb.ModelInferRequest) -> None:
    """Raise InvalidRequest unless there is one raw entry per input that is not in shared memory."""
    expected = sum(region_place(f"input {quoted(t.name)}", t.parameters) is None for t in message.inputs)
    if len(message.raw_input_contents) != expected:
        raise InvalidRequest(
            f"raw_input_contents has {len(message.raw_input_contents)} entries for {expected} inputs; it holds one per"
            " input, in their order, without those in shared memory, and is never mixed with contents"
        )
