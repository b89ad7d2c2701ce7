"""REST on the real server: the outputs of gRPC bit for bit, its drift samples, and the commands of ``docs/rest.md``."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from artifacts import write_kinds, write_mlp, write_words
from inprocess import running_ports
from restport import RestPort
from serverprocess import ServerProcess
from waiting import until

from bf16kit.messages.errors import ConfigError
from bf16kit.numerics.tensors import BY_OIP
from bf16kit.protocol import inference_pb2 as pb
from bf16kit.service.config.serverconfig import load_config
from bf16kit.service.grpc.handlers import SERVICE
from bf16kit.service.wire.tensors import decode_raw, encode_raw

DOCS = Path(__file__).parents[3] / "docs"
BITS = np.random.default_rng(9)
Server = tuple[grpc.Channel, RestPort]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    write_kinds(repository / "kinds" / "1")
    write_words(repository / "words" / "1")
    write_mlp(repository / "demo" / "1", width=4)
    models = "kinds", "words", "demo"
    with (
        running_ports(repository, *models, http_inference=True) as (where, port),
        grpc.insecure_channel(where) as channel,
    ):
        yield channel, RestPort(port)


def by_grpc(channel: grpc.Channel, model: str, raw: Mapping[str, bytes], rows: int) -> dict[str, bytes]:
    """Send bytes as they are; return the bytes of the outputs."""
    inputs = [pb.ModelInferRequest.InferInputTensor(name=name, datatype=name, shape=[rows, 2]) for name in raw]
    message = pb.ModelInferRequest(model_name=model, inputs=inputs, raw_input_contents=raw.values())
    infer: Any = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    response = pb.ModelInferResponse.FromString(infer(message.SerializeToString(), timeout=60))
    return dict(zip((o.name for o in response.outputs), response.raw_output_contents, strict=True))


def by_rest(rest: RestPort, model: str, raw: Mapping[str, bytes], rows: int, *binary: str) -> dict[str, bytes]:
    """Send and ask for the named tensors in binary, the others in JSON; return the bytes of the outputs."""
    inputs, outputs, tail = [], [], b""
    for name, data in raw.items():
        tensor: dict[str, Any] = {"name": name, "datatype": name, "shape": [rows, 2]}
        if name in binary:
            tensor["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            tensor["data"] = decode_raw(name, BY_OIP[name], (rows, 2), data).tolist()
        inputs.append(tensor)
        outputs.append({"name": f"{name}.out", "parameters": {"binary_data": name in binary}})
    head = json.dumps({"id": "r-é", "inputs": inputs, "outputs": outputs}).encode()
    status, answer, headers = rest.infer(head + tail, model, **{"Inference-Header-Content-Length": str(len(head))})
    assert status == 200, answer
    rest_of_it = b""
    if binary:
        end = int(headers["Inference-Header-Content-Length"])
        answer, rest_of_it = json.loads(answer[:end]), answer[end:]
    assert (answer["id"], answer["model_name"], answer["parameters"]["precision"]) == ("r-é", model, "bf16")
    found = {}
    for output in answer["outputs"]:
        if "data" in output:
            dtype = BY_OIP[output["datatype"]]
            found[output["name"]] = encode_raw(dtype, np.array(output["data"], dtype.numpy))
        else:
            size = output["parameters"]["binary_data_size"]
            found[output["name"]], rest_of_it = rest_of_it[:size], rest_of_it[size:]
    assert not rest_of_it
    return found


def test_every_datatype_has_the_bits_of_grpc_in_json_and_in_binary(server: Server) -> None:
    channel, rest = server
    rows = 3
    kinds = [name for name in BY_OIP if name != "BYTES"]
    raw = {name: BITS.bytes(2 * rows * BY_OIP[name].numpy.itemsize) for name in kinds}
    raw["BOOL"] = bytes([0, 1, 1, 0, 0, 1])
    raw["FP32"] = np.array([1e-45, -0.0, 3.4028235e38, 0.1, np.pi, -1e-38], np.float32).tobytes()
    raw["FP64"] = np.array([5e-324, -0.0, 1.7976931348623157e308, 0.1, np.pi, -1e-308]).tobytes()
    raw["INT64"] = np.array([-(2**63), 2**63 - 1, 2**53 + 1, -1, 0, 1], np.int64).tobytes()
    raw["UINT64"] = np.array([2**64 - 1, 2**63, 2**53 + 1, 2, 0, 1], np.uint64).tobytes()
    expected = by_grpc(channel, "kinds", raw, rows)
    assert len(expected) == len(raw)
    assert by_rest(rest, "kinds", raw, rows, *raw) == expected
    assert by_rest(rest, "kinds", raw, rows, "FP16", "BF16", "INT64") == expected  # of which JSON holds not two


def test_strings_and_values_that_are_no_numbers_are_those_of_grpc(server: Server) -> None:
    channel, rest = server
    words = np.array([["bf16", "é\n\0"], ["", '"\\' * 300]], np.object_)
    numbers = np.array([[np.nan, np.inf], [-np.inf, 0.0]], np.float32)
    raw = {"BYTES": encode_raw(BY_OIP["BYTES"], words), "FP32": numbers.tobytes()}
    expected = by_grpc(channel, "words", raw, 2)
    assert expected == {f"{name}.out": data for name, data in raw.items()}
    assert by_rest(rest, "words", raw, 2) == by_rest(rest, "words", raw, 2, "BYTES", "FP32") == expected


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_commands_of_the_page_work(server: Server, tmp_path: Path) -> None:
    _, rest = server
    blocks = re.findall(r"^```\n(.*?)^```", (DOCS / "rest.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    commands = [block.replace("localhost:8002", f"127.0.0.1:{rest.port}") for block in blocks if "curl" in block]
    said = "".join(
        subprocess.run(["sh", "-ec", each], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for each in commands
    )
    metadata, *answers = (json.loads(line) for line in said.replace("}{", "}\n{").splitlines())
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert len(answers) == 2
    assert answers[0]["outputs"][0]["shape"] == [1, 4]
    assert answers[0] == answers[1]


@pytest.mark.long
def test_requests_by_rest_are_counted_and_sampled_for_drift(tmp_path: Path) -> None:
    write_mlp(tmp_path / "mlp" / "1")
    (tmp_path / "mlp" / "serving.yaml").write_text("shadow: {rate: 1, max_per_second: 1000}\n")
    with ServerProcess("--repository", tmp_path, "--device", "cpu", "--http-inference") as server:
        rest = RestPort(server.wait_ready().ports()[1])
        asked = {"id": "r-1", "inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 16], "data": [0.5] * 32}]}
        for _ in range(3):
            status, answer, _ = rest.infer(asked, "mlp")
            assert (status, answer["id"], answer["parameters"]) == (200, "r-1", {"precision": "bf16"})
        until(lambda: server.of_model("drift_samples_total", outcome="measured") == 6, 60)
        assert rest.infer({"inputs": []}, "mlp")[0] == 400
        assert server.of_model("requests_total", code="OK") == 3
        assert server.of_model("requests_total", code="INVALID_ARGUMENT") == 1
        server.stop()


def test_several_workers_have_no_rest_and_without_the_key_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http_inference is given with workers 2.*give workers 1"):
        load_config({"repository": tmp_path, "http_inference": True, "workers": 2})
    with running_ports(tmp_path) as (_, port):
        assert RestPort(port).ask("GET", "/v2/health/live")[0] == 404
        assert RestPort(port).infer({})[0] == 405
