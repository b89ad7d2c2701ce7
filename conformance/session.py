"""What every check works with: the server, its models, requests that fit them, and answers read and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from conformance import judging
from conformance.models import Model
from conformance.protocol import inference_pb2 as pb
from conformance.suite import Code, Failed, Question, Skipped
from conformance.target import Answer, Target
from conformance.wire import Array, Tensor, encode, fill_contents

#: For each extension with RPCs of its own, one that asks and changes nothing; given the name of a model.
PROBES: Mapping[str, Callable[[str], tuple[str, Message]]] = {
    "model_configuration": lambda name: ("ModelConfig", pb.ModelConfigRequest(name=name)),
    "statistics": lambda name: ("ModelStatistics", pb.ModelStatisticsRequest(name=name)),
    "model_repository": lambda name: ("RepositoryIndex", pb.RepositoryIndexRequest()),
    "system_shared_memory": lambda name: ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    "cuda_shared_memory": lambda name: ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
    "trace": lambda name: ("TraceSetting", pb.TraceSettingRequest()),
    "logging": lambda name: ("LogSettings", pb.LogSettingsRequest()),
}
_LOCKED = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


@dataclass(frozen=True, slots=True)
class Options:
    """What the user allows. ``control``: a model that may be unloaded and loaded again."""

    control: str = ""
    same_host: bool = False  # the server can open what lies in this machine's /dev/shm
    dangerous: bool = False  # what has ended servers may be tried
    patience: float = 10.0  # seconds until a model that was unloaded is gone, and what was answered is counted
    region_prefix: str = "conformance_"  # of the keys of shared memory that the suite makes


@dataclass(slots=True)
class Session:
    """One run against one server. ``model`` is the one that rules of no particular model are tried on."""

    target: Target
    model: Model
    models: Sequence[Model]
    extensions: frozenset[str]
    options: Options = field(default_factory=Options)
    closed: Mapping[str, str] = field(default_factory=dict)  # extensions whose RPCs want credentials, and the refusal
    _asked: dict[str, tuple[Question, Answer]] = field(default_factory=dict)

    def asked(self, name: str, ask: Callable[[Session], Question]) -> tuple[Question, Answer]:
        """The answer to a question, which is asked once, however many checks look at it."""
        if name not in self._asked:
            question = ask(self)
            self._asked[name] = question, self.target.call(question.rpc, question.message)
        return self._asked[name]

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
        """A request that the model must answer; ``typed``: with typed contents where its datatypes have them."""
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
        """The answer to a request that must be answered."""
        answer = self.target.call("ModelInfer", request)
        if not answer.ok:
            raise Failed("an answer", answer, request)
        response: pb.ModelInferResponse = answer.message
        return response

    def outputs(self, request: pb.ModelInferRequest, model: Model | None = None) -> dict[str, Array]:
        """The outputs that a request is answered with, each judged by the protocol and the model's metadata."""
        response = self.infer(request)
        return judging.outputs(model or self.model, request, response)

    def alive(self) -> None:
        """Fails where the server does not answer any more."""
        answer = self.target.call("ServerLive", pb.ServerLiveRequest())
        if not answer.ok or not answer.message.live:
            raise Failed("the server to live on", answer, "ServerLive after what came before")
        self.infer(self.request())

    # --- what the server has ----------------------------------------------------------------------------------------

    def with_input(self, datatype: str, *, typed: bool = False) -> tuple[Model, str]:
        """A model and an input of it with this datatype; ``typed``: all of its inputs have typed contents."""
        for model in (self.model, *self.models):
            for spec in model.inputs:
                if spec.datatype == datatype and not (typed and model.raw_only):
                    return model, spec.name
        raise Skipped(f"no model here takes {datatype}{' without FP16 or BF16 beside it' if typed else ''}")

    def with_output(self, *datatypes: str) -> tuple[Model, str]:
        """A model and an output of it with one of these datatypes."""
        for model in (self.model, *self.models):
            for spec in model.outputs:
                if spec.datatype in datatypes:
                    return model, spec.name
        raise Skipped(f"no model here answers with {' or '.join(datatypes)}")

    def several_inputs(self) -> tuple[Model, list[str]]:
        """A model that needs more than one input, and their names."""
        for model in (self.model, *self.models):
            needed = [spec.name for spec in model.inputs if spec.name not in model.optional]
            if len(needed) > 1:
                return model, needed
        raise Skipped("no model here needs more than one input")

    def batching(self, rows: int = 2) -> Model:
        """A model that takes ``rows`` at once."""
        for model in (self.model, *self.models):
            if model.max_batch_size >= rows:
                return model
        raise Skipped(f"no model here takes {rows} rows at once, as far as its configuration says")


def locked(target: Target, model: str, extensions: Iterable[str]) -> dict[str, str]:
    """Those of ``extensions`` that the server keeps to clients with credentials, and what it says to others."""
    refused = {}
    for extension in extensions:
        if extension in PROBES:
            answer = target.call(*PROBES[extension](model))
            if answer.code in _LOCKED or (answer.code is Code.UNAVAILABLE and "restricted" in answer.details):  # Triton
                refused[extension] = str(answer)
    return refused
