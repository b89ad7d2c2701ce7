"""What one loaded model needs to read its requests and write its answers, worked out once per model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bf16kit.errors import InvalidRequest
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.tensors import BY_NAME, BY_OIP, DType, check_feeds, describe
from bf16kit.wording import quoted
from service.contract import Cancellation, Model, Reply, Request
from service.wire import parameters
from service.wire.bounds import BoundsCheck, item_size
from service.wire.tensors import Array, decode_contents, decode_raw, encode_raw, widen, wire_dtype


class InferenceCodec:
    """Turns ``ModelInferRequest`` into :class:`Request` and :class:`Reply` into ``ModelInferResponse`` for one model.

    Holds what the model is made of, never the model: an unloaded one must not be kept alive by its codec.
    """

    def __init__(self, model: Model) -> None:
        self._name = model.name
        self._version = str(model.version)
        self._specs = model.inputs
        self._inputs = {spec.name: (spec, BY_NAME[spec.dtype]) for spec in model.inputs}
        self._outputs: Mapping[str, DType] = {spec.name: BY_NAME[spec.dtype] for spec in model.outputs}
        self._batch_axis = model.batch_axis
        self._max_rows = model.max_batch_size
        self._bounds = BoundsCheck(model)

    def decode(
        self, message: pb.ModelInferRequest, priority: int, deadline: float | None, cancellation: Cancellation
    ) -> tuple[Request, Mapping[str, DType]]:
        """The request in ``message``, checked, and the datatypes to answer it in. ``deadline``: monotonic seconds.

        Raises :class:`InvalidRequest` naming the input, what came and what was expected.
        """
        dtypes, wanted = self._outputs, None
        if message.outputs:
            dtypes = self._answer_dtypes(message.outputs)
            wanted = tuple(dtypes)
        feeds = self._feeds(message)
        sizes = check_feeds(self._specs, feeds)
        rows = self._rows(feeds)
        self._bounds.check_request(feeds, sizes, dtypes)
        return Request(feeds, rows, wanted, deadline, cancellation, priority), dtypes

    def encode(
        self, request_id: str, reply: Reply, dtypes: Mapping[str, DType], hold: Callable[[int], None] | None = None
    ) -> pb.ModelInferResponse:
        """The answer to a request: outputs in the order of ``reply``, each in ``raw_output_contents``.

        ``hold`` is told the size of it before it is encoded, and may raise. Raises :class:`InvalidRequest` when it is
        larger than the model's answers may be.
        """
        nbytes = sum(array.size * item_size(dtypes[name]) for name, array in reply.outputs.items())
        self._bounds.check_answer(nbytes)
        if hold is not None:
            hold(nbytes)
        response = pb.ModelInferResponse(model_name=self._name, model_version=self._version, id=request_id)
        outputs, raw = response.outputs, response.raw_output_contents
        for name, array in reply.outputs.items():
            dtype = dtypes[name]
            outputs.add(name=name, datatype=dtype.oip, shape=array.shape)
            raw.append(encode_raw(dtype, array))
        return response

    def _feeds(self, message: pb.ModelInferRequest) -> dict[str, Array]:
        inputs, raw = message.inputs, message.raw_input_contents
        if raw and len(raw) != len(inputs):
            raise InvalidRequest(
                f"raw_input_contents has {len(raw)} entries for {len(inputs)} inputs; it holds one per input,"
                " in their order, and is never mixed with contents"
            )
        feeds: dict[str, Array] = {}
        for index, tensor in enumerate(inputs):
            name = tensor.name
            if name in feeds:
                raise InvalidRequest(f"input {name!r} came twice")
            feeds[name] = self._feed(name, tensor, raw[index] if raw else None)
        return feeds

    def _feed(self, name: str, tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Array:
        known = self._inputs.get(name)
        if known is None:
            raise InvalidRequest(f"unknown input {quoted(name)}; the model's inputs are {', '.join(self._inputs)}")
        spec, model_dtype = known
        if tensor.parameters:
            parameters.check_input(name, tensor.parameters)
        dtype = wire_dtype(spec, model_dtype, tensor.datatype)
        rank = len(tensor.shape)
        if rank != len(spec.shape):  # before anything is multiplied: a message has room for a million dimensions
            raise InvalidRequest(f"input {name!r} is of rank {rank}, expected {describe(spec.shape)}")
        shape = tuple(tensor.shape)
        if raw is None:
            array = decode_contents(name, dtype, shape, tensor.contents)
        elif tensor.HasField("contents"):
            raise InvalidRequest(f"input {name!r} has contents beside raw_input_contents; use one of them")
        else:
            array = decode_raw(name, dtype, shape, raw)
        return array if dtype is model_dtype else widen(array)

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

    def _answer_dtypes(self, outputs: Sequence[pb.ModelInferRequest.InferRequestedOutputTensor]) -> dict[str, DType]:
        """The outputs asked for, in their order, and the datatype in which each is to be answered."""
        dtypes: dict[str, DType] = {}
        for output in outputs:
            name = output.name
            native = self._outputs.get(name)
            if native is None:
                raise InvalidRequest(
                    f"unknown output {quoted(name)}; the model's outputs are {', '.join(self._outputs)}"
                )
            if name in dtypes:
                raise InvalidRequest(f"output {name!r} was asked for twice")
            dtypes[name] = BY_OIP[parameters.output_datatype(name, native.oip, output.parameters)]
        return dtypes
