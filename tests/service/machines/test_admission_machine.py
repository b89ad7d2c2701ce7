"""Admission as a state machine: any order of calls, requests, runs, slow readers, clients that leave, and a drain.

The product's calls, pool, servicer, batchers and timeouts run whole; only gRPC is not there (``arrivingcalls``). What
must be true is counted here anew, after each step.

Breaking one of these is found: a call that ends before its request keeps its place, a call rejected in a drain does, a
cancelled request stays in the queue, bytes are kept, there is no limit, no fair share or no model share after an error,
a lease is released twice, a client that left is answered, a timeout goes on after the request, readers have none, the
reasons are swapped, or a queue is one too long.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc
import numpy as np
import pytest
from arrivingcalls import Arriving
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loopback import LoopbackModel, LoopbackRegistry, infer_request
from machinesettings import machine_settings
from waiting import until

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.contract import Array
from bf16kit.service.grpc import admission
from bf16kit.service.grpc.admission import ByteBudget, RequiredScope, RpcPool
from bf16kit.service.grpc.call import InferenceCall, Rpc
from bf16kit.service.grpc.inference import InferenceServicer
from bf16kit.service.grpc.timeouts import CallTimeouts
from bf16kit.service.request import Done, Request
from bf16kit.service.wire.limits import MessageReader

T = TypeVar("T")
LIMIT, MODEL_LIMIT, QUEUE = 8, 4, 2  # calls in flight; of them in models; and how many wait in one
BYTES, LARGE_ROWS = 200_000, 4096  # of all calls; and 49 KB in a large request, as in its response
SLOW, PRESSED, MOST_SLOW = 10.0, 3.0, 2  # seconds a client may take, less under pressure; and how many may be slow
GRACE = 4.0
PATIENCE = 20.0  # seconds for what takes milliseconds; a failure is tried again and again to shrink it
METHOD = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name["ModelInfer"]
MODELS, CLIENTS = ("a", "b"), ("one", "two", "three", "four", "five")
# The last one takes all places.
CROWDS = (
    "",
    "one",
    "one two three four five",
    "one one one one two two two three four",
)
OK, FULL, GONE = grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
LATE = grpc.StatusCode.DEADLINE_EXCEEDED
MESSAGES = {
    (name, large): infer_request(name, x=np.ones((LARGE_ROWS if large else 1, 3), np.float32)).SerializeToString()
    for name in MODELS
    for large in (False, True)
}
places, rarely = st.integers(0, 7), st.sampled_from([False, False, False, True])


class HeldModel(LoopbackModel):
    """Its runs wait until they are told to end. ``accepted`` counts the requests that wait or run."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self._hold, max_batch_size=0, max_queue=QUEUE)
        self.runs = self.accepted = 0
        self._ends = threading.Semaphore(0)

    def begin(self, request: Request, done: Done) -> None:
        super().begin(request, done)
        self.accepted += 1

    def end_one(self) -> None:
        self._ends.release()

    def _hold(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self.runs += 1
        assert self._ends.acquire(timeout=60)
        self.runs -= 1
        return {"y": np.array(feeds["x"])}


@dataclass(eq=False)
class Admitted:
    """A call that was admitted, until gRPC has nothing left to do for it."""

    call: Arriving
    model: str
    large: bool
    late: bool  # its deadline has passed on arrival
    since: float  # when the server began to wait for the client
    sent: bool = False


class Admission(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.threads = set(threading.enumerate())
        self.patched = pytest.MonkeyPatch()
        # What gRPC passes to an executor is the call and its arrival here.
        self.patched.setattr(admission, "find_arrival", lambda arguments: arguments)
        self.now, self.draining, self.pressed_seconds = 0.0, False, PRESSED
        self.refusals, self.due_refusals = Counter[str](), Counter[str]()
        self.admitted: list[Admitted] = []
        self.inside: dict[str, list[Admitted]] = {name: [] for name in MODELS}  # in a model: the first one runs
        self.models = {name: HeldModel(name) for name in MODELS}
        for model in self.models.values():
            model.batcher.start()
        self.budget = ByteBudget(BYTES)
        self.pool = RpcPool("infer", LIMIT, "requests", "in_flight", self.refused, SLOW, SLOW, MOST_SLOW, self.budget)
        timeouts = partial(CallTimeouts, SLOW, PRESSED, lambda: self.pressed, clock=lambda: self.now)
        self.pool.receive_timeouts, self.pool.send_timeouts = timeouts(max_slow=MOST_SLOW), timeouts()
        self.streams = ThreadPoolExecutor(1)
        registry = LoopbackRegistry(list(self.models.values()))
        self.servicer = InferenceServicer(registry, self.refused, MODEL_LIMIT, self.streams, 1)
        reader = MessageReader(METHOD.input_type, 1 << 24)
        serialize = GetMessageClass(METHOD.output_type).SerializeToString
        self.rpc = Rpc(self.pool, RequiredScope(), reader, serialize, self.servicer.ModelInfer, reader.is_quick)

    def refused(self, reason: str) -> None:
        self.refusals[reason] += 1

    def teardown(self) -> None:
        """Drain the server: nobody comes in, and everything ends."""
        try:
            self.drain()
            self.arrive("new", "a", large=False, late=False)
            for name in MODELS:
                while self.inside[name]:
                    self.finish(name)
            while self.admitted:
                self.end(self.admitted[0])
            self.nothing_exceeds_its_limit()
            assert self.pool.shares.wait_empty(0)
            assert (self.budget.in_use, self.servicer.shares.in_use) == (0, 0)
        finally:
            self.patched.undo()
            for model in self.models.values():
                for _ in range(10):
                    model.end_one()
                assert model.batcher.close()
            self.pool.shutdown()
            self.streams.shutdown()
        until(lambda: set(threading.enumerate()) <= self.threads, PATIENCE)

    # --- calls --------------------------------------------------------------------------------------------------------

    @initialize(crowd=st.sampled_from(CROWDS), models=st.integers(1, 2), sent=st.booleans(), large=st.booleans())
    def begin(self, crowd: str, models: int, sent: bool, large: bool) -> None:
        """Begin with a server at work: hypothesis leaves out most rules in most examples."""
        for number, client in enumerate(crowd.split()):
            self.arrive(client, MODELS[number % models], large=large, late=False)
            if sent and self.silent():
                self.send(0)

    @rule(client=st.sampled_from(CLIENTS), model=st.sampled_from(MODELS), large=st.booleans(), late=rarely)
    def arrive(self, client: str, model: str, large: bool, late: bool) -> None:
        """The headers of a call arrive. It is admitted, or rejected at once with the reason that is true."""
        call, own = Arriving(client, 0.0 if late else 1e10), self.held_by(client)
        before, total = Counter(self.refusals), len(self.admitted)
        self.pool.submit(behave, InferenceCall(self.rpc, None), call)
        new = self.refusals - before
        if call.code is None:
            assert not self.draining
            assert total < LIMIT
            assert 2 * total < LIMIT or own < max(1, LIMIT // self.clients(client)), "over its share"
            self.admitted.append(Admitted(call, model, large, late, self.now))
            return
        assert call.responses == 1
        assert not call.awaits_request, "a rejected call is not read"
        if self.draining:
            assert (call.code, new) == (GONE, Counter(["draining"]))
        elif total == LIMIT:
            assert (call.code, new) == (FULL, Counter(["in_flight"]))
        else:
            assert (call.code, new) == (FULL, Counter(["connection_share"]))
            assert own, "a newcomer finds room"
            assert 2 * total >= LIMIT, "anybody finds room while half of the places are free"

    @precondition(lambda self: self.silent())
    @rule(at=places)
    def send(self, at: int) -> None:
        """The request of an admitted call arrives. It reaches its model, or is rejected with a true reason."""
        given = one_of(self.silent(), at)
        model, inside, total = self.models[given.model], self.inside[given.model], sum(map(len, self.inside.values()))
        before, accepted, held = Counter(self.refusals), model.accepted, self.budget.in_use
        given.sent, given.since = True, self.now
        size = len(MESSAGES[given.model, given.large])
        given.call.send(MESSAGES[given.model, given.large])
        until(lambda: given.call.code is not None or model.accepted > accepted, PATIENCE)
        new, code = self.refusals - before, given.call.code
        if code is None:
            assert not given.late
            assert len(inside) <= QUEUE
            assert total < MODEL_LIMIT
            inside.append(given)
            until(lambda: model.runs, PATIENCE)
        elif given.late:
            assert (code, new) == (LATE, Counter())
        elif new == Counter(["bytes"]):
            assert code is FULL
            assert held, "a single call may have any number"
            assert held + 2 * size > BYTES
        elif new == Counter(["model_share"]):
            assert code is FULL
            assert total == MODEL_LIMIT or (inside and 2 * total >= MODEL_LIMIT), "one model shuts out no other"
        else:
            assert (code, new) == (FULL, Counter())
            assert len(inside) == 1 + QUEUE, "its queue is full"

    @precondition(lambda self: self.admitted)
    @rule(at=places)
    def read_or_leave(self, at: int) -> None:
        """A client reads what it was sent, or leaves: its place is free at once."""
        self.end(one_of(self.admitted, at))

    @rule(model=st.sampled_from(MODELS))
    def finish(self, model: str) -> None:
        """A run ends: its client gets one response, if it is still there, and the next request runs."""
        inside, held = self.inside[model], self.models[model]
        if not inside:
            return
        given, before = inside.pop(0), Counter(self.refusals)
        there = not given.call.ended
        held.end_one()
        until(lambda: held.leases == len(inside) and (given.call.code is not None or not there), PATIENCE)
        if there:
            given.since = self.now
            new = self.refusals - before
            assert (given.call.code, new) in [(OK, Counter()), (FULL, Counter(["bytes"]))]
            assert given.large or not new, "a small response finds room"
        else:
            assert given.call.responses == 0, "nobody answers a client that has left"
        until(lambda: held.runs == bool(inside), PATIENCE)

    @rule(seconds=st.sampled_from([1.5, 3.5, 11.0]))
    def wait(self, seconds: float) -> None:
        """Clients that are too slow lose their calls."""
        self.now += seconds
        slow = [each for each in self.silent() if self.now - each.since > self.pressed_seconds]
        self.lose(slow[MOST_SLOW:] + self.too_slow(slow[:MOST_SLOW]), self.pool.receive_timeouts)
        self.lose(self.too_slow([e for e in self.admitted if e.call.code is OK]), self.pool.send_timeouts)

    def too_slow(self, waited_for: list[Admitted]) -> list[Admitted]:
        limit = self.pressed_seconds if self.pressed else SLOW
        return [each for each in waited_for if self.now - each.since > limit]

    def lose(self, late: list[Admitted], timeouts: CallTimeouts) -> None:
        before = Counter(self.refusals)
        timeouts.end_expired()
        assert {each.call for each in self.admitted if each.call.cancelled} == {each.call for each in late}
        assert self.refusals - before == Counter({"too_slow": len(late)})
        for each in late:
            self.admitted.remove(each)

    @rule()
    def drain(self) -> None:
        self.pool.drain(GRACE)
        self.draining, self.pressed_seconds = True, GRACE / 2

    # --- what must be true --------------------------------------------------------------------------------------------

    @invariant()
    def nothing_exceeds_its_limit(self) -> None:
        assert self.pool.shares.in_use == len(self.admitted) <= LIMIT
        inside = sum(map(len, self.inside.values()))
        assert self.servicer.shares.in_use == inside <= MODEL_LIMIT
        for name, model in self.models.items():
            assert model.leases == len(self.inside[name])
        assert self.budget.in_use <= BYTES or len(self.admitted) == 1 or self.budget.in_use <= 2 * BYTES
        assert self.budget.in_use >= 0
        if not any(each.sent for each in self.admitted):
            assert self.budget.in_use == 0
        assert all(each.call.responses <= 1 for each in self.admitted)

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def pressed(self) -> bool:
        return self.draining or self.pool.shares.half_full or self.budget.half_full

    def silent(self) -> list[Admitted]:
        """Return the calls whose request has not arrived, the oldest first."""
        return [each for each in self.admitted if not each.sent]

    def held_by(self, client: str) -> int:
        return sum(each.call.client == client for each in self.admitted)

    def clients(self, newcomer: str) -> int:
        return len({newcomer} | {each.call.client for each in self.admitted})

    def end(self, given: Admitted) -> None:
        self.admitted.remove(given)
        given.call.end()
        inside = self.inside[given.model]
        if given in inside[1:]:  # it waits; a run goes on to its end
            inside.remove(given)


def behave(call: InferenceCall, arriving: Arriving) -> None:
    arriving.behave(call)


def one_of(these: Sequence[T], at: int) -> T:
    return these[at % len(these)]


def test_any_order_of_calls_is_admitted_rejected_and_released_as_the_limits_say() -> None:
    run_state_machine_as_test(Admission, settings=machine_settings(1.0))


@pytest.mark.long
def test_any_long_order_of_calls_is_admitted_rejected_and_released_as_the_limits_say() -> None:
    run_state_machine_as_test(Admission, settings=machine_settings(10.0, in_ci=2.5))
