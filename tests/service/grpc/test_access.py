"""TLS, clients' certificates and tokens on the gRPC port, over real sockets."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from loopback import LoopbackModel, Served, infer_request, serving
from ownlog import restored_log
from rawgrpc import RawConnection
from tlsfiles import Authority, Pair
from waiting import until

from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.config.certificates import CertificateFiles
from bf16kit.service.config.tokens import TokenFile
from bf16kit.service.grpc.handlers import SERVICE
from bf16kit.service.operations import Operations
from bf16kit.service.regions import RegionTable
from bf16kit.service.telemetry.settings import LogSettings

X = np.ones((1, 3), np.float32)
INFER = infer_request(x=X)
MANY = infer_request(x=np.zeros((8, 3), np.float32))
ALIVE = pb.ServerLiveRequest()
LOAD = pb.RepositoryModelLoadRequest(model_name="echo")
QUIET = pb.LogSettingsRequest(settings={"log_info": pb.LogSettingsRequest.SettingValue(bool_param=False)})
APPLICATION, SCRAPER, OPERATOR = "application-0123456", "scraper-0123456789", "operator-012345678"
SCOPES = {APPLICATION: ("infer",), SCRAPER: ("read",), OPERATOR: ("infer", "read", "manage")}


class Nothing:
    """Model control whose operations do nothing."""

    def load(self, name: str, config: str | None = None) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    unload = load


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
        file.write_text("".join(f"{token} {','.join(scopes)}\n" for token, scopes in SCOPES.items()))
        file.chmod(0o600)
        return TokenFile(file)

    @pytest.fixture
    def served(self, tokens: TokenFile, tmp_path: Path) -> Iterator[Served]:
        """Yield a server with every operation that clients may use."""
        (tmp_path / "mem").write_bytes(b"1")
        regions = RegionTable("mem", tmp_path)
        operations = Operations(control=Nothing(), regions=regions, logs=LogSettings("info", "text"))
        with restored_log(), serving(LoopbackModel(), tokens=tokens, operations=operations) as served:
            yield served

    @pytest.mark.parametrize(
        ("method", "message", "scope"),
        [
            ("ModelInfer", INFER, "infer"),
            ("ModelMetadata", pb.ModelMetadataRequest(name="echo"), "read"),
            ("RepositoryIndex", pb.RepositoryIndexRequest(), "read"),
            ("LogSettings", pb.LogSettingsRequest(), "read"),
            ("LogSettings", QUIET, "manage"),
            ("RepositoryModelLoad", LOAD, "manage"),
            ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="echo"), "manage"),
            # The server opens files with its own permissions for the client that registers them.
            (
                "SystemSharedMemoryRegister",
                pb.SystemSharedMemoryRegisterRequest(name="r", key="mem", byte_size=1),
                "manage",
            ),
            ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(), "manage"),
            ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(), "manage"),
        ],
    )
    def test_each_call_needs_its_scope(self, served: Served, method: str, message: Any, scope: str) -> None:
        for token, scopes in SCOPES.items():
            if scope in scopes:
                served.call(method, message, token=token)
            else:
                code, details = served.refusal(method, message, token)
                assert code is grpc.StatusCode.PERMISSION_DENIED
                # Who may not even read the settings is told so first.
                assert f"lacks the scope {scope!r}" in details or (message is QUIET and token == APPLICATION)
                assert token not in details
        assert set(served.log.refusals) == {"forbidden"}

    @pytest.mark.parametrize("token", [None, "nobody-knows-this-1", "application-012345"])
    def test_a_request_without_a_known_token_is_not_read(self, served: Served, token: str | None) -> None:
        code, details = served.refusal("ModelInfer", INFER, token)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert not token or token not in details
        assert (served.log.refusals, served.log.seen) == (["unauthenticated"], [])

    def test_only_a_client_with_the_scope_learns_that_an_rpc_is_not_served(self, tokens: TokenFile) -> None:
        with serving(LoopbackModel(), tokens=tokens) as served:
            codes = [served.refusal("RepositoryModelLoad", LOAD, t)[0] for t in (None, SCRAPER, OPERATOR)]
        assert [code.name for code in codes] == ["UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"]

    def test_probes_need_no_token(self, served: Served) -> None:
        stub: Any = health_pb2_grpc.HealthStub(served.channel)
        assert served.call("ServerLive", ALIVE).live
        assert served.call("ModelReady", pb.ModelReadyRequest(name="echo")).ready
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20).status
        assert next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)).status

    def test_reflection_needs_a_token_with_the_scope_read(self, served: Served) -> None:
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            _services(served.channel)
        with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED"):
            _services(served.channel, APPLICATION)
        assert SERVICE in _services(served.channel, SCRAPER)


@contextmanager
def secured(served: Served, trusted: Authority, own: Pair | None = None) -> Iterator[Served]:
    """Yield a client that trusts this authority and perhaps has a certificate of its own."""
    identity = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
    credentials = grpc.ssl_channel_credentials(trusted.certificate.read_bytes(), *identity)
    # A channel shares its connection with other channels to the same address, unless its options differ.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"localhost:{served.port}", credentials, options) as channel:
        yield replace(served, channel=channel)


class TestTls:
    def test_clients_that_trust_the_authority_are_served_and_plain_ones_are_not(
        self, authority: Authority, pair: Pair
    ) -> None:
        with serving(LoopbackModel(), certificates=CertificateFiles(pair.certificate, pair.key)) as served:
            with secured(served, authority) as client:
                assert client.call("ModelInfer", INFER).model_name == "echo"
            assert served.refusal("ServerLive", ALIVE)[0] is grpc.StatusCode.UNAVAILABLE

    def test_a_client_without_the_required_certificate_is_rejected(self, authority: Authority, pair: Pair) -> None:
        files = CertificateFiles(pair.certificate, pair.key, authority.certificate)
        with serving(LoopbackModel(), certificates=files) as served:
            with secured(served, authority) as anonymous:
                assert anonymous.refusal("ServerLive", ALIVE)[0] is grpc.StatusCode.UNAVAILABLE
            with secured(served, authority, authority.sign("client")) as known:
                assert known.call("ServerLive", ALIVE).live

    @pytest.mark.long
    def test_a_new_certificate_is_used_for_new_connections(self, tmp_path: Path) -> None:
        """The client trusts the new authority only, and the server is not restarted."""
        for name in ("old", "new"):
            (tmp_path / name).mkdir()
        newer = Authority(tmp_path / "new")
        pair, renewed = Authority(tmp_path / "old").sign("server"), newer.sign("server")
        with serving(LoopbackModel(), certificates=CertificateFiles(pair.certificate, pair.key)) as served:
            renewed.key.replace(pair.key)
            renewed.certificate.replace(pair.certificate)

            def answered() -> bool:
                with secured(served, newer) as client:
                    try:
                        return bool(client.call("ServerLive", ALIVE).live)
                    except grpc.RpcError:
                        return False

            until(answered, what="a connection with the new certificate")


def test_responses_are_not_compressed() -> None:
    with serving(LoopbackModel()) as served, RawConnection(served.port) as client:
        path, message = f"/{SERVICE}/ModelInfer", MANY.SerializeToString()
        asked = client.call(path, message, ("grpc-accept-encoding", "identity,deflate,gzip"))
        until(lambda: asked in client.ended, what="the response")
        assert asked not in client.compressed
