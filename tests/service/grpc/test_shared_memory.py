"""Shared memory over a real socket: its RPCs, and the limits and guarantees for requests that use it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from loopback import Gate, LoopbackModel, Served, infer_request, serving
from waiting import until

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.operations import Operations, Region
from bf16kit.service.regions import RegionTable

X = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(X.tobytes() + bytes(X.nbytes))
    return path


@pytest.fixture
def regions(file: Path) -> RegionTable:
    """Return a table for a file with 96 bytes of an input and 96 bytes for an output."""
    return RegionTable("mem", file.parent, regions=2)


@pytest.fixture
def registered(regions: RegionTable) -> RegionTable:
    regions.register(Region("in", "memory", 0, X.nbytes))
    regions.register(Region("out", "memory", X.nbytes, X.nbytes))
    return regions


@pytest.fixture
def served(regions: RegionTable) -> Iterator[Served]:
    with serving(LoopbackModel(), operations=Operations(regions=regions)) as served:
        yield served


def request(*, shared_input: bool = True, shared_output: bool = False) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="echo") if shared_input else infer_request(x=X)
    if shared_input:
        place(message.inputs.add(name="x", datatype="FP32", shape=X.shape), "in")
    if shared_output:
        place(message.outputs.add(name="y"), "out")
    return message


def place(tensor: Any, region: str) -> None:
    tensor.parameters["shared_memory_region"].string_param = region
    tensor.parameters["shared_memory_byte_size"].int64_param = X.nbytes


def test_a_region_over_the_limit_is_rejected_and_counted(served: Served, registered: RegionTable) -> None:
    third = pb.SystemSharedMemoryRegisterRequest(name="third", key="memory", byte_size=1)
    assert served.refusal("SystemSharedMemoryRegister", third)[0] is StatusCode.RESOURCE_EXHAUSTED
    assert served.log.refusals == ["regions"]


def test_a_requests_bytes_in_shared_memory_count_as_held_bytes(registered: RegionTable) -> None:
    gate = Gate()
    with serving(
        LoopbackModel(run=gate), operations=Operations(regions=registered), max_request_bytes=2 * X.nbytes - 1
    ) as served:
        first = served.stub("ModelInfer").future(request(), timeout=60)
        assert gate.started.wait(60)
        code, details = served.refusal("ModelInfer", request())
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert "requests and responses hold" in details
        gate.go.set()
        np.testing.assert_array_equal(np.frombuffer(first.result().raw_output_contents[0], np.float32), X.ravel())
        np.testing.assert_array_equal(
            np.frombuffer(served.call("ModelInfer", request()).raw_output_contents[0], np.float32), X.ravel()
        )


def test_inputs_in_shared_memory_have_the_limit_of_a_message(registered: RegionTable) -> None:
    with serving(LoopbackModel(), operations=Operations(regions=registered), max_message_bytes=X.nbytes - 1) as served:
        code, details = served.refusal("ModelInfer", request())
    assert code is StatusCode.INVALID_ARGUMENT
    assert f"the inputs have {X.nbytes} bytes or more in shared memory, expected at most {X.nbytes - 1}" in details


def test_a_client_that_changes_its_memory_during_the_run_does_not_change_the_response(
    registered: RegionTable, file: Path
) -> None:
    gate = Gate()
    with serving(LoopbackModel(run=gate), operations=Operations(regions=registered)) as served:
        call = served.stub("ModelInfer").future(request(), timeout=60)
        assert gate.started.wait(60)
        file.write_bytes(bytes(2 * X.nbytes))
        gate.go.set()
        np.testing.assert_array_equal(np.frombuffer(call.result().raw_output_contents[0], np.float32), X.ravel())


def test_the_memory_of_a_client_that_has_left_is_not_written_to(registered: RegionTable, file: Path) -> None:
    """The memory may hold other data by then."""
    gate, before = Gate(), file.read_bytes()
    with serving(LoopbackModel(run=gate), operations=Operations(regions=registered)) as served:
        call = served.stub("ModelInfer").future(request(shared_output=True), timeout=60)
        assert gate.started.wait(60)
        (model,) = served.registry.models()
        call.cancel()
        cancellation = model.seen[0].cancellation
        assert cancellation is not None
        until(lambda: cancellation.cancelled)
        gate.go.set()
        until(lambda: served.log.observations)
        assert served.log.observations[0].code == "CANCELLED"
    assert file.read_bytes() == before
