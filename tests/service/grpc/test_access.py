"""TLS, clients' certificates and tokens on the gRPC port, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from loopback import LoopbackModel, LoopbackRegistry, RequestLog, infer_request
from ownlog import restored_log
from rawgrpc import RawConnection
from tlsfiles import Authority, Pair
from waiting import until

from bf16kit.protocol import inference_pb2 as pb
from service.config.certificates import CertificateFiles
from service.config.logsettings import LogSettings
from service.config.tokens import TokenFile
from service.grpc.handlers import SERVICE
from service.grpc.transport import Transport, TransportOptions
from service.operations import Operations
from service.regions.table import RegionTable

X = np.ones((1, 3), np.float32)
MANY = infer_request(x=np.zeros((8, 3), np.float32))
TOKENS = "application-0123456 infer\nscraper-0123456789 read\noperator-012345678 infer,read,manage  # everything\n"


class Nothing:
    """Model control whose operations do nothing."""

    def load(self, name: str, config: str | None = None) -> Future[None]:
        return self.unload(name)

    def unload(self, name: str) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


@contextmanager
def secured(
    tokens: TokenFile | None = None,
    certificates: CertificateFiles | None = None,
    operations: Operations = Operations(),  # noqa: B008 - frozen
    **options: Any,
) -> Iterator[tuple[int, RequestLog]]:
    model, log = LoopbackModel(), RequestLog()
    model.log = log
    transport = Transport(
        LoopbackRegistry([model]),
        log.refused,
        TransportOptions(port=0, **options),
        tokens,
        certificates,
        operations,
    )
    model.batcher.start()
    port = transport.start()
    try:
        yield port, log
    finally:
        transport.stop(grace=0)
        model.batcher.close(time.monotonic() + 30)


def call(channel: grpc.Channel, method: str, message: Any, token: str | None = None) -> Any:
    rpc = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method]
    stub: Any = channel.unary_unary(
        f"/{SERVICE}/{method}",
        request_serializer=GetMessageClass(rpc.input_type).SerializeToString,
        response_deserializer=GetMessageClass(rpc.output_type).FromString,
    )
    return stub(message, timeout=20, metadata=[("authorization", f"Bearer {token}")] if token else None)


def refusal(channel: grpc.Channel, method: str, message: Any, token: str | None = None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, method, message, token)
    return refused.value.code(), refused.value.details() or ""


def _services(channel: grpc.Channel, token: str | None = None) -> set[str]:
    """Return the names of the services that reflection lists."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    metadata = [("authorization", f"Bearer {token}")] if token else None
    answer = next(stub.ServerReflectionInfo(iter([question]), timeout=20, metadata=metadata))
    return {service.name for service in answer.list_services_response.service}


class TestTokens:
    @pytest.fixture
    def tokens(self, tmp_path: Path) -> TokenFile:
        file = tmp_path / "tokens"
        file.write_text(TOKENS)
        file.chmod(0o600)
        return TokenFile(file)

    def test_each_call_needs_its_scope(self, tokens: TokenFile) -> None:
        required = {
            "infer": ("ModelInfer", infer_request(x=X)),
            "read": ("ModelMetadata", pb.ModelMetadataRequest(name="echo")),
        }
        holders = {"application-0123456": {"infer"}, "scraper-0123456789": {"read"}}
        with secured(tokens) as (port, log), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for token, scopes in {**holders, "operator-012345678": {"infer", "read"}}.items():
                for scope, (method, message) in required.items():
                    if scope in scopes:
                        call(channel, method, message, token)
                    else:
                        code, details = refusal(channel, method, message, token)
                        assert code is grpc.StatusCode.PERMISSION_DENIED
                        assert f"lacks the scope {scope!r}" in details
                        assert token not in details
            assert log.refusals == ["forbidden", "forbidden"]

    @pytest.mark.parametrize("token", [None, "nobody-knows-this-1", "application-012345"])
    def test_a_request_without_a_known_token_is_not_read(self, tokens: TokenFile, token: str | None) -> None:
        with secured(tokens) as (port, log), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            code, details = refusal(channel, "ModelInfer", infer_request(x=X), token)
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert not token or token not in details
            assert (log.refusals, log.seen) == (["unauthenticated"], [])

    def test_only_a_client_with_the_scope_learns_that_an_rpc_is_not_served(self, tokens: TokenFile) -> None:
        load = pb.RepositoryModelLoadRequest(model_name="echo")
        with secured(tokens) as (port, _), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert refusal(channel, "RepositoryModelLoad", load)[0] is grpc.StatusCode.UNAUTHENTICATED
            code, _ = refusal(channel, "RepositoryModelLoad", load, "scraper-0123456789")
            assert code is grpc.StatusCode.PERMISSION_DENIED
            code, _ = refusal(channel, "RepositoryModelLoad", load, "operator-012345678")
            assert code is grpc.StatusCode.UNIMPLEMENTED

    def test_models_are_listed_with_one_scope_and_loaded_with_another(self, tokens: TokenFile) -> None:
        load, unload = pb.RepositoryModelLoadRequest(model_name="m"), pb.RepositoryModelUnloadRequest(model_name="m")
        with (
            secured(tokens, operations=Operations(control=Nothing())) as (port, _),
            grpc.insecure_channel(f"127.0.0.1:{port}") as there,
        ):
            call(there, "RepositoryIndex", pb.RepositoryIndexRequest(), "scraper-0123456789")
            for rpc, message in (("RepositoryModelLoad", load), ("RepositoryModelUnload", unload)):
                code, details = refusal(there, rpc, message, "scraper-0123456789")
                assert (code, "lacks the scope 'manage'" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)
                call(there, rpc, message, "operator-012345678")

    def test_shared_memory_rpcs_need_the_scope_manage(self, tokens: TokenFile, tmp_path: Path) -> None:
        """The server opens files with its own permissions for the client that registers them."""
        operations = Operations(regions=RegionTable("mem", tmp_path))
        rpcs = {
            "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(name="r", key="mem", byte_size=1),
            "SystemSharedMemoryStatus": pb.SystemSharedMemoryStatusRequest(),
            "SystemSharedMemoryUnregister": pb.SystemSharedMemoryUnregisterRequest(),
        }
        (tmp_path / "mem").write_bytes(b"1")
        with secured(tokens, operations=operations) as (port, _), grpc.insecure_channel(f"127.0.0.1:{port}") as there:
            for rpc, message in rpcs.items():
                for token in ("application-0123456", "scraper-0123456789"):
                    code, details = refusal(there, rpc, message, token)
                    assert (code, "lacks the scope 'manage'" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)
                call(there, rpc, message, "operator-012345678")

    def test_settings_are_read_with_one_scope_and_changed_with_another(self, tokens: TokenFile) -> None:
        quiet = pb.LogSettingsRequest(settings={"log_info": pb.LogSettingsRequest.SettingValue(bool_param=False)})
        operations = Operations(logs=LogSettings("info", "text"))
        with secured(tokens, operations=operations) as (port, log), grpc.insecure_channel(f"127.0.0.1:{port}") as there:
            code, _ = refusal(there, "LogSettings", pb.LogSettingsRequest(), "application-0123456")
            assert code is grpc.StatusCode.PERMISSION_DENIED
            seen = call(there, "LogSettings", pb.LogSettingsRequest(), "scraper-0123456789")
            code, details = refusal(there, "LogSettings", quiet, "scraper-0123456789")
            assert (code, "lacks the scope 'manage'" in details) == (grpc.StatusCode.PERMISSION_DENIED, True)
            assert call(there, "LogSettings", pb.LogSettingsRequest(), "scraper-0123456789") == seen
            assert log.refusals == ["forbidden", "forbidden"]
            with restored_log():
                changed = call(there, "LogSettings", quiet, "operator-012345678")
            assert not changed.settings["log_info"].bool_param

    def test_probes_need_no_token(self, tokens: TokenFile) -> None:
        with secured(tokens) as (port, _), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert call(channel, "ServerLive", pb.ServerLiveRequest()).live
            assert call(channel, "ModelReady", pb.ModelReadyRequest(name="echo")).ready
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status
            assert next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)).status

    def test_reflection_needs_a_token_with_the_scope_read(self, tokens: TokenFile) -> None:
        with secured(tokens) as (port, _), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                _services(channel)
            with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED"):
                _services(channel, "application-0123456")  # infer
            assert SERVICE in _services(channel, "scraper-0123456789")


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path)

    def test_clients_that_trust_the_authority_are_served_and_plain_ones_are_not(self, authority: Authority) -> None:
        pair = authority.sign("server")
        with secured(certificates=CertificateFiles(pair.certificate, pair.key)) as (port, _):
            with _channel(port, authority) as channel:
                assert call(channel, "ModelInfer", infer_request(x=X)).model_name == "echo"
            with grpc.insecure_channel(f"localhost:{port}") as plain:
                assert refusal(plain, "ServerLive", pb.ServerLiveRequest())[0] is grpc.StatusCode.UNAVAILABLE

    def test_a_client_without_the_required_certificate_is_rejected(self, authority: Authority) -> None:
        pair = authority.sign("server")
        files = CertificateFiles(pair.certificate, pair.key, authority.certificate)
        with secured(certificates=files) as (port, _):
            with _channel(port, authority) as anonymous:
                assert refusal(anonymous, "ServerLive", pb.ServerLiveRequest())[0] is grpc.StatusCode.UNAVAILABLE
            with _channel(port, authority, authority.sign("client")) as known:
                assert call(known, "ServerLive", pb.ServerLiveRequest()).live

    def test_a_new_certificate_is_used_for_new_connections(self, authority: Authority, tmp_path: Path) -> None:
        """The client trusts the new authority only, and the server is not restarted."""
        pair = authority.sign("server")
        with secured(certificates=CertificateFiles(pair.certificate, pair.key)) as (port, _):
            (tmp_path / "new").mkdir()
            newer = Authority(tmp_path / "new")
            renewed = newer.sign("server")
            renewed.key.replace(pair.key)
            renewed.certificate.replace(pair.certificate)

            def answered() -> bool:
                with _channel(port, newer) as channel:
                    try:
                        return bool(call(channel, "ServerLive", pb.ServerLiveRequest()).live)
                    except grpc.RpcError:
                        return False

            until(answered, what="a connection with the new certificate")


def test_compressed_requests_are_read() -> None:
    with secured() as (port, _):
        options = [("grpc.default_compression_algorithm", 2)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options, compression=grpc.Compression.Gzip) as channel:
            assert call(channel, "ModelInfer", MANY).outputs[0].shape == [8, 3]


def test_responses_are_not_compressed() -> None:
    with secured() as (port, _), RawConnection(port) as client:
        path, message = f"/{SERVICE}/ModelInfer", MANY.SerializeToString()
        asked = client.call(path, message, ("grpc-accept-encoding", "identity,deflate,gzip"))
        until(lambda: asked in client.ended, what="the response")
        assert asked not in client.compressed


def _channel(port: int, trusted: Authority, client: Pair | None = None) -> grpc.Channel:
    own = (client.key.read_bytes(), client.certificate.read_bytes()) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(trusted.certificate.read_bytes(), *own)
    # A channel shares its connection with other channels to the same address, unless its options differ.
    return grpc.secure_channel(f"localhost:{port}", credentials, [("grpc.use_local_subchannel_pool", 1)])
