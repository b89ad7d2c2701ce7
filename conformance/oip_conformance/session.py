"""The context of all checks: the server, its models, requests that fit them, and validated responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from oip_conformance import judging
from oip_conformance.models import Model
from oip_conformance.protocol import inference_pb2 as pb
from oip_conformance.suite import Code, Failed, InvalidCall, Skipped
from oip_conformance.target import Response, Target
from oip_conformance.wire import Array, Tensor, encode, fill_contents

#: For each extension with RPCs of its own, a call that changes nothing, for a model's name.
PROBES: Mapping[str, Callable[[str], Message]] = {
    "model_configuration": lambda name: pb.ModelConfigRequest(name=name),
    "statistics": lambda name: pb.ModelStatisticsRequest(name=name),
    "model_repository": lambda name: pb.RepositoryIndexRequest(),
    "system_shared_memory": lambda name: pb.SystemSharedMemoryStatusRequest(),
    "cuda_shared_memory": lambda name: pb.CudaSharedMemoryStatusRequest(),
    "trace": lambda name: pb.TraceSettingRequest(),
    "logging": lambda name: pb.LogSettingsRequest(),
}
_LOCKED = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


@dataclass(frozen=True, slots=True)
class Options:
    """The user's permissions. ``control``: a model that may be unloaded and loaded again."""

    control: str = ""
    same_host: bool = False  # the server can open files in this machine's /dev/shm
    dangerous: bool = False  # checks that have crashed servers may run
    patience: float = 10.0  # seconds to wait until an unloaded model is gone, or until responses are counted
    region_prefix: str = "conformance_"  # of the keys of the suite's shared memory


@dataclass(slots=True)
class Session:
    """One run against one server. ``model`` is used for rules that concern no particular model."""

    target: Target
    model: Model
    models: Sequence[Model]
    extensions: frozenset[str]
    options: Options = field(default_factory=Options)
    # extensions whose RPCs need credentials, each with the rejection
    restricted: Mapping[str, str] = field(default_factory=dict)
    _invalid_calls: dict[str, tuple[InvalidCall, Response]] = field(default_factory=dict)

    def call_once(self, name: str, make_call: Callable[[Session], InvalidCall]) -> tuple[InvalidCall, Response]:
        """Return the call and its response; it is made only once, however many checks use it."""
        if name not in self._invalid_calls:
            call = make_call(self)
            self._invalid_calls[name] = call, self.target.call(call.message)
        return self._invalid_calls[name]

    # --- requests ---------------------------------------------------------------------------------------------------

    def request(
        self,
        model: Model | None = None,
        *,
        rows: int = 1,
        feeds: Mapping[str, Tensor] | None = None,
        typed: bool = False,
        outputs: Sequence[str] = (),
        request_id: str = "",
        version: str = "",
    ) -> pb.ModelInferRequest:
        """Return a valid request for the model; with ``typed`` its data is in typed contents."""
        model = model or self.model
        message = pb.ModelInferRequest(model_name=model.name, model_version=version, id=request_id)
        for name, tensor in (feeds if feeds is not None else model.feeds(rows)).items():
            made = message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.array.shape)
            if typed:
                fill_contents(tensor, made.contents)
            else:
                message.raw_input_contents.append(encode(tensor))
        for name in outputs:
            message.outputs.add(name=name)
        return message

    def infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        """Send a request that must succeed, and return the response; :class:`Failed` if it does not."""
        response = self.target.call(request)
        if not response.ok:
            raise Failed("an answer", response, request)
        message: pb.ModelInferResponse = response.message
        return message

    def outputs(self, request: pb.ModelInferRequest, model: Model | None = None) -> dict[str, Array]:
        """Send a request that must succeed, and return its outputs, checked against the protocol and the metadata."""
        response = self.infer(request)
        return judging.outputs(model or self.model, request, response)

    def alive(self) -> None:
        """Raise :class:`Failed` if the server no longer responds."""
        response = self.target.call(pb.ServerLiveRequest())
        if not response.ok or not response.message.live:
            raise Failed("the server to live on", response, "ServerLive after what came before")
        self.infer(self.request())

    # --- models of the server ---------------------------------------------------------------------------------------

    def with_input(self, datatype: str, *, typed: bool = False) -> tuple[Model, str]:
        """Return a model and its input of this datatype.

        With ``typed``, all inputs of the model have typed contents.
        """
        for model in (self.model, *self.models):
            for spec in model.inputs:
                if spec.datatype == datatype and not (typed and model.raw_only):
                    return model, spec.name
        raise Skipped(f"no model here takes {datatype}{' without FP16 or BF16 beside it' if typed else ''}")

    def with_output(self, *datatypes: str) -> tuple[Model, str]:
        """Return a model and its output of one of these datatypes."""
        for model in (self.model, *self.models):
            for spec in model.outputs:
                if spec.datatype in datatypes:
                    return model, spec.name
        raise Skipped(f"no model here answers with {' or '.join(datatypes)}")

    def several_inputs(self) -> tuple[Model, list[str]]:
        """Return a model that needs more than one input, and their names."""
        for model in (self.model, *self.models):
            needed = [spec.name for spec in model.inputs if spec.name not in model.optional]
            if len(needed) > 1:
                return model, needed
        raise Skipped("no model here needs more than one input")

    def batching(self, rows: int = 2) -> Model:
        """Return a model that takes ``rows`` rows in one request."""
        for model in (self.model, *self.models):
            if model.max_batch_size >= rows:
                return model
        raise Skipped(f"no model here takes {rows} rows at once, as far as its configuration says")


def restricted_extensions(target: Target, model: str, extensions: Iterable[str]) -> dict[str, str]:
    """Return those of ``extensions`` that need credentials, each with the server's rejection."""
    refused = {}
    for extension in extensions:
        if extension in PROBES:
            response = target.call(PROBES[extension](model))
            if response.code in _LOCKED or (
                response.code is Code.UNAVAILABLE and "restricted" in response.details
            ):  # Triton
                refused[extension] = str(response)
    return refused
