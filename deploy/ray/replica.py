"""A replica: one model, served as by a `bf16-serve` process, with the front's calls in place of its gRPC port."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from queue import SimpleQueue

import ray
from bf16kit.deploy.ray.models import Report
from bf16kit.deploy.ray.rpcs import RPCS, held_bytes
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.config.logs import configure
from bf16kit.service.config.resources import bound_heap
from bf16kit.service.config.serverconfig import LOOPBACK, ServerConfig
from bf16kit.service.grpc.admission import ByteBudget
from bf16kit.service.grpc.control import ControlServicer
from bf16kit.service.grpc.inference import InferenceServicer, OtherCall
from bf16kit.service.grpc.status import Status, status_of
from bf16kit.service.models.plan import DesiredModel
from bf16kit.service.operations import Operations, RegistryModels
from bf16kit.service.server import ModelServer
from bf16kit.service.wire.parameters import wants_final_mark

_MAINTAIN_SECONDS = 0.1
_CHECK_SECONDS = 0.05


class Replica:
    """``desired`` is what to serve: a replica that is started later serves the same as the others.

    Ray sends it at most ``calls`` requests at once, which may have ``request_bytes`` together with their responses. It
    does so once the constructor returns: then the model has passed every gate, including its golden samples. Otherwise
    the constructor raises RuntimeError with the reason, and Ray tries again.
    """

    def __init__(self, config: ServerConfig, desired: DesiredModel, calls: int, request_bytes: int) -> None:
        bound_heap()
        # No lame duck here: whoever removes it has told load balancers before, so no request arrives by the time Ray
        # stops it.
        changed = {"http_port": 0, "model_control": "none", "lame_duck_seconds": 0.0}
        self._config = config.model_copy(update=changed)
        configure(config.log_level, config.log_format)
        self._ended = threading.Event()
        self._served = served = ModelServer(self._config, [desired])
        self._budget = ByteBudget(request_bytes)
        self._threads = ThreadPoolExecutor(calls, "call")
        self._inference = InferenceServicer(
            served.repository,
            served.metrics.refused,
            2 * calls,  # more than Ray sends: its one model may have all
            Executor(),  # for streams, which come as single requests
            0,
            tracer=served.tracing,
        )
        self._control = ControlServicer(served.repository, Operations())
        served.start(0)
        self._maintaining = threading.Thread(target=self._maintain, name="maintain", daemon=True)
        self._maintaining.start()
        self._wait_until_loaded()

    def _wait_until_loaded(self) -> None:
        slots = self._served.repository.models
        while any(slot.state == "loading" for slot in slots()):
            time.sleep(_CHECK_SECONDS)
        if not any(slot.state == "ready" for slot in slots()):
            reasons = "; ".join(f"version {slot.version}: {slot.reason}" for slot in slots()) or "it has no version"
            self._end()
            raise RuntimeError(f"the model cannot be served: {reasons}")  # the front finds this text in Ray's state

    async def answer(self, rpc: str, data: bytes, client: str, metadata: Mapping[str, str | bytes]) -> bytes | Status:
        """Return the response to a request. If Ray cancels this, the request leaves the model's queue."""
        with held_bytes(self._budget) as held:
            call = OtherCall(client, metadata, held)  # Ray cancels it at its deadline
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._respond, rpc, data, call)
            finally:
                call.cancellation.cancel()

    def _respond(self, rpc: str, data: bytes, call: OtherCall) -> bytes | Status:
        try:
            message = RPCS[rpc].parse(data, call.held.reserve)
            if rpc not in ("ModelInfer", "ModelStreamInfer"):
                found: bytes = getattr(self._control, rpc)(message, call).SerializeToString()
                return found
            responses: SimpleQueue[pb.ModelInferResponse | Status] = SimpleQueue()
            self._inference.ModelInfer(message, call, responses.put)
            response = responses.get()
        except Exception as error:  # noqa: BLE001 -- the table decides what the client may know
            return status_of(error)
        if isinstance(response, Status):
            return response
        if rpc == "ModelInfer":
            return bytes(response.SerializeToString())
        if wants_final_mark(message.parameters):
            response.parameters["triton_final_response"].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=response).SerializeToString()

    async def report(self) -> Report:
        """Return the state of the versions, their counts, and where this replica is scraped."""
        models, host = RegistryModels(self._served.repository), self._config.host
        address = host if host in LOOPBACK else ray.util.get_node_ip_address()
        return Report(f"{address}:{self._served.http.port}", models.index(), models.statistics("", ""))

    def check_health(self) -> None:
        """Raise RuntimeError if no version is ready. Ray calls this, and replaces a replica that raises."""
        if not any(slot.state == "ready" for slot in self._served.repository.models()):
            raise RuntimeError("no version of the model is ready now")

    def __del__(self) -> None:
        """Stop. Ray calls this when no request is active any more, or the time for that is over."""
        with contextlib.suppress(AttributeError):  # the constructor did not finish
            if not self._ended.is_set():
                self._end()

    def stop(self, grace: float) -> bool:
        """Return that no request is active: Ray ends a replica only then."""
        return True

    def _end(self) -> None:
        self._ended.set()
        self._maintaining.join()
        self._served.drain(self)
        self._served.close()
        self._threads.shutdown(wait=False)

    def _maintain(self) -> None:
        while not self._ended.wait(_MAINTAIN_SECONDS):
            self._served.maintain()
