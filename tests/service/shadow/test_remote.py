"""A model of another V2 server as the reference: real servers on real sockets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass
from loopback import LoopbackModel, serving
from tlsfiles import Authority, Pair

from bf16kit.messages.errors import InvalidRequest, RuntimeFailure, Unavailable
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.runtime import Array
from service.config.certificates import CertificateFiles
from service.drift.policy import Remote
from service.grpc.handlers import SERVICE
from service.shadow.remote import RemoteReference

X, Y = TensorSpec("x", "float32", ("batch", 3)), TensorSpec("y", "float32", ("batch", 3))
FEEDS = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
_RPCS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


class Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code = code


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Connect = Callable[..., RemoteReference]


@pytest.fixture
def connect(clock: Clock) -> Iterator[Connect]:
    made: list[RemoteReference] = []

    def reference(
        address: str,
        model: str = "echo",
        inputs: tuple[TensorSpec, ...] = (X,),
        outputs: tuple[TensorSpec, ...] = (Y,),
        *,
        tls: bool = False,
        authority: Path | None = None,
    ) -> RemoteReference:
        remote = Remote(address, model, "", tls)
        made.append(RemoteReference("m", remote, inputs, outputs, 1 << 20, authority, clock))
        made[-1].connect()
        return made[-1]

    yield reference
    for each in made:
        each.close()


def run(reference: RemoteReference) -> dict[str, Array]:
    return reference.run(FEEDS, ("y",), seconds=20.0)


@contextmanager
def typed(answers: Mapping[str, Callable[[Any], Any]]) -> Iterator[str]:
    """Yield the address of a server that answers each RPC with the function in ``answers``."""

    def handler(name: str) -> Any:
        rpc = _RPCS.methods_by_name[name]

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return answers[name](request)
            except Aborted as aborted:
                context.abort(aborted.code, str(aborted))

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=GetMessageClass(rpc.input_type).FromString,
            response_serializer=GetMessageClass(rpc.output_type).SerializeToString,
        )

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {name: handler(name) for name in answers}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def metadata(request: Any) -> pb.ModelMetadataResponse:
    told = pb.ModelMetadataResponse(name=request.name)
    told.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
    told.outputs.add(name="y", datatype="FP32", shape=[-1, 3])
    return told


def test_the_reference_returns_the_other_servers_outputs(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with serving(LoopbackModel(run=lambda feeds: {"y": 2 * feeds["x"]})) as served:
        reference = connect(served.address)
        assert reference.up
        np.testing.assert_array_equal(run(reference)["y"], 2 * FEEDS["x"])
    assert f"m: live drift on: grpc://{served.address}/echo answers after" in caplog.text


def test_the_other_server_may_return_typed_contents(connect: Connect) -> None:
    def infer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        told = pb.ModelInferResponse()
        told.outputs.add(name="y", datatype="FP32", shape=[2, 3]).contents.fp32_contents.extend(range(6))
        return told

    with typed({"ModelMetadata": metadata, "ModelInfer": infer}) as address:
        np.testing.assert_array_equal(run(connect(address))["y"], FEEDS["x"])


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "says"),
    [
        ("FP16", [2, 3], 12, "not as FP32"),
        ("FP32", [2, 3], 20, "bytes that do not fit their datatype and shape"),
        ("FP32", [2, 3], 0, "bytes that do not fit their datatype and shape"),
        ("", [], 0, "did not return output 'y'"),
    ],
)
def test_an_invalid_response_fails_the_sample(
    datatype: str, shape: list[int], raw: int, says: str, connect: Connect
) -> None:
    def infer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        told = pb.ModelInferResponse()
        if datatype:
            told.outputs.add(name="y", datatype=datatype, shape=shape)
        if raw:
            told.raw_output_contents.append(bytes(raw))
        return told

    with typed({"ModelMetadata": metadata, "ModelInfer": infer}) as address:
        reference = connect(address)
        with pytest.raises(RuntimeFailure, match=says):
            run(reference)
        assert reference.up


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        ((TensorSpec("z", "float32", ("batch", 3)),), (Y,), "it has no input 'z'; it has x"),
        ((TensorSpec("x", "float64", ("batch", 3)),), (Y,), "its input 'x' is FP32, not FP64"),
        ((X,), (TensorSpec("y", "float32", ("batch", 4)),), r"its output 'y' has shape \[-1, 3\]"),
        ((X,), (TensorSpec("y", "float32", ("batch", 3, 1)),), r"its output 'y' has shape \[-1, 3\]"),
        ((), (Y,), "it has an input 'x', which this model does not have"),
    ],
)
def test_a_model_with_other_tensors_is_not_used_and_the_reason_is_logged(
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    says: str,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(LoopbackModel()) as served:
        reference = connect(served.address, "echo", inputs, outputs)
        assert not reference.up
        with pytest.raises(Unavailable):
            run(reference)
    assert len(caplog.records) == 1
    assert re.search(says, caplog.text)


def test_while_the_server_is_away_samples_fail_at_once_and_retries_become_rarer(
    connect: Connect, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(LoopbackModel()) as served:
        model = served.registry.models()[0]
        served.registry.change(model, "loading")
        reference = connect(served.address)
        assert "UNAVAILABLE: model 'echo' version 1 is not ready" in caplog.text
        for pause in (1.0, 2.0, 4.0):
            for at in (0.0, pause - 0.01):
                clock.now += at
                with pytest.raises(Unavailable):
                    run(reference)
            assert f"trying again in {pause:.0f} s" in caplog.records[-1].getMessage()
            clock.now += 0.02
            with pytest.raises(Unavailable):
                run(reference)
        assert len(caplog.records) == 4
        served.registry.change(model, "ready")
        clock.now += 8.0
        assert run(reference)
        assert reference.up


def test_the_error_for_a_rejected_sample_does_not_contain_its_data(connect: Connect) -> None:
    def refuse(feeds: Mapping[str, Array]) -> dict[str, Array]:
        raise InvalidRequest(f"x must not be {feeds['x']}")

    with serving(LoopbackModel(run=refuse)) as served:
        reference = connect(served.address)
        with pytest.raises(RuntimeFailure) as failed:
            run(reference)
        assert str(failed.value) == f"grpc://{served.address}/echo rejected a sample with INVALID_ARGUMENT"
        assert reference.up


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE])
def test_the_other_servers_error_text_is_not_logged(
    code: grpc.StatusCode, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def infer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        raise Aborted(code, "cannot compute patient 4711")

    with typed({"ModelMetadata": metadata, "ModelInfer": infer}) as address:
        reference = connect(address)
        with pytest.raises(Unavailable) as failed:
            run(reference)
        assert not reference.up
    assert f"cannot serve as the fp32 reference: {code.name}; trying again in" in caplog.text
    assert "4711" not in caplog.text + str(failed.value)


def test_proxies_of_the_environment_are_not_used(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where no server listens
    with serving(LoopbackModel()) as served:
        assert connect(served.address).up


def test_a_size_limit_beyond_the_largest_channel_option_is_accepted(clock: Clock) -> None:
    with serving(LoopbackModel()) as served:
        reference = RemoteReference("m", Remote(served.address, "echo", ""), (X,), (Y,), 2**31, clock=clock)
        try:
            assert run(reference)
        finally:
            reference.close()


@pytest.mark.parametrize("host", ["unix", "vsock", "ipv4"])
def test_a_host_named_like_a_grpc_scheme_is_resolved_as_a_host(connect: Connect, host: str) -> None:
    """Otherwise a file of this machine could be used as the reference."""
    reference = connect(f"{host}:1")
    target = reference._channel._channel.target().decode()  # type: ignore[union-attr]  # of what the stubs show
    assert target == f"dns:///{host}:1"
    assert not reference.up


class TestTls:
    """``grpcs://``: rows of live requests are sent only to servers that the authority certifies."""

    @pytest.fixture
    def proving(self, pair: Pair) -> CertificateFiles:
        return CertificateFiles(pair.certificate, pair.key)

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
    def test_a_server_that_the_authority_certifies_is_used(
        self,
        connect: Connect,
        authority: Authority,
        proving: CertificateFiles,
        host: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("INFO")
        with serving(LoopbackModel(), certificates=proving) as served:
            reference = connect(f"{host}:{served.port}", tls=True, authority=authority.certificate)
            np.testing.assert_array_equal(run(reference)["y"], FEEDS["x"])
        assert f"m: live drift on: grpcs://{host}:{served.port}/echo answers after" in caplog.text

    def test_a_server_that_is_not_certified_gets_no_samples(
        self, connect: Connect, tmp_path: Path, proving: CertificateFiles, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its certificate is from another authority, not from a public one, or for another name, or it uses no TLS."""
        other = Authority(tmp_path, "other")
        named = other.sign("named", names="DNS:elsewhere.example")
        for certificates, authority in (
            (proving, other.certificate),
            (proving, None),
            (CertificateFiles(named.certificate, named.key), other.certificate),
            (None, other.certificate),
        ):
            with serving(echo := LoopbackModel(), certificates=certificates) as served:
                reference = connect(f"127.0.0.1:{served.port}", tls=True, authority=authority)
                assert not reference.up
                with pytest.raises(Unavailable):
                    run(reference)
            assert echo.calls == 0
        assert caplog.text.count("cannot serve as the fp32 reference: UNAVAILABLE") == 4

    def test_a_tls_server_is_not_used_over_plain_text(self, connect: Connect, proving: CertificateFiles) -> None:
        with serving(LoopbackModel(), certificates=proving) as served:
            assert not connect(f"127.0.0.1:{served.port}").up

    def test_a_replaced_authority_is_trusted_from_the_next_attempt_on(
        self,
        connect: Connect,
        authority: Authority,
        tmp_path: Path,
        proving: CertificateFiles,
        clock: Clock,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """While the authority's file is missing, no server is trusted."""
        trusted = tmp_path / "ca.pem"
        trusted.write_bytes(Authority(tmp_path, "old").certificate.read_bytes())
        with serving(LoopbackModel(), certificates=proving) as served:
            reference = connect(f"127.0.0.1:{served.port}", tls=True, authority=trusted)
            assert not reference.up
            trusted.unlink()
            clock.now += 60
            reference.connect()
            assert not reference.up
            assert f"reference_ca {trusted}: cannot be read: No such file or directory" in caplog.text
            trusted.write_bytes(authority.certificate.read_bytes())
            clock.now += 60
            assert run(reference)
