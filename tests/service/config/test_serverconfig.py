from pathlib import Path

import pytest

from bf16kit.messages.errors import ConfigError
from bf16kit.service.config.serverconfig import ServerConfig, load_config, unknown_variables


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_a_flag_overrides_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "server.yaml", f"repository: {tmp_path}\ngrpc_port: 1\nhttp_port: 2\nhost: ::1\n")
    monkeypatch.setenv("BF16KIT_GRPC_PORT", "11")
    monkeypatch.setenv("BF16KIT_HTTP_PORT", "12")
    config = load_config({"grpc_port": 21, "http_port": None}, file)
    assert (config.grpc_port, config.http_port, config.host, config.device) == (21, 12, "::1", "auto")
    assert (config.workers, config.model_control) == (1, "none")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"grpc_port": 70000}, "'grpc_port' is 70000: input should be less than or equal to 65535"),
        ({"device": "tpu"}, "'device' is 'tpu': give auto, cpu, cuda or cuda:N"),
        ({"drain_seconds": -1}, "'drain_seconds' is -1"),
        ({"drain_seconds": float("inf")}, "'drain_seconds' is inf"),
        ({"host": ""}, "'host' is ''"),
        ({"host": "a\udcff"}, "'host' is"),
        ({"repository": ""}, "'repository' is ''"),
        ({"repository": None}, "'repository' is missing; give --repository DIRECTORY, or BF16KIT_REPOSITORY"),
        ({"workers": 0}, "'workers' is 0"),
        ({"workers": 65}, "'workers' is 65"),
        ({"log_format": "xml"}, "'log_format' is 'xml': input should be 'text' or 'json'"),
        ({"tls_key": "k"}, "tls_key is given without tls_certificate; TLS needs both"),
        ({"tls_certificate": "c"}, "tls_certificate is given without tls_key; TLS needs both"),
        ({"tls_client_ca": "a"}, "tls_client_ca is given without tls_certificate"),
        ({"token_file": ""}, "'token_file' is '': give a path; leave it out for none"),
        ({"model_control": "all"}, "'model_control' is 'all'"),
        ({"poll_seconds": 0.5}, "'poll_seconds' is 0.5: input should be greater than or equal to 1"),
        ({"load_model": ("m",)}, "load_model is given with model_control none; it needs explicit"),
        ({"load_model": ("m", "*"), "model_control": "explicit"}, "load_model has \\* beside other names"),
        ({"repository": "/no/such/place"}, "is not a directory; create it"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_was_expected(
    tmp_path: Path, flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"repository": tmp_path, **flags})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "expected keys and values, found list"),
        ("a: [", "is not YAML"),
        ("1: 2\n", "unknown key '1'"),
        ("grpc_porcelain: 1\n", r"server\.yaml: unknown key 'grpc_porcelain'; known keys are .*grpc_port"),
        (  # all at once, and before a value that is wrong: a key that seems to be missing may be one of them
            "grpc-port: 1\nhttp_port: -1\nHOTS: x\n",
            r"server\.yaml: unknown keys 'grpc-port' \(did you mean grpc_port\?\), 'HOTS' \(did you mean host\?\)$",
        ),
        ("host: x\n\tgrpc_port: 1\n", r"server\.yaml: line 2, column 1: is not YAML: .*\n   grpc_port: 1\n  \^$"),
        ("a: &x 1\nb: *x\n", "line 2: .*x is an alias: write the value itself there"),
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2: 'c' is given twice: leave one out"),
        ("token_file:\n", r"'token_file' is '': give a path; leave it out for none$"),
        ("token_file: [a]\n", r"'token_file' is \['a'\]: give a path$"),
        ("a: 2001-99-99\n", "is not YAML"),  # the parser has its own errors for invalid dates and numbers
        ("a: " + "1" * 5000, "is not YAML"),
        (f"a: {1 << 63}", "line 1: '9223372036854775808' has more than 64 bits: give a smaller number"),
        ("a: " + "[" * 5000, "is not YAML"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"repository": tmp_path}, write(tmp_path / "server.yaml", text))


def test_a_missing_file_is_rejected_and_an_empty_one_sets_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config({"repository": tmp_path}, tmp_path / "server.yaml")
    assert load_config({"repository": tmp_path}, write(tmp_path / "server.yaml", "")).grpc_port == 8001


def test_evidence_on_a_network_address_needs_tokens(tmp_path: Path) -> None:
    """Evidence contains data that clients sent."""
    (tmp_path / "tokens").write_text("")
    for host in ("0.0.0.0", "10.0.0.7", "server.example"):
        with pytest.raises(ConfigError, match=r"evidence is given with host .* and no token_file.*give token_file"):
            load_config({"repository": str(tmp_path), "evidence": True, "host": host})
        load_config(
            {"repository": str(tmp_path), "evidence": True, "host": host, "token_file": str(tmp_path / "tokens")}
        )
    for host in ("127.0.0.1", "::1", "localhost"):
        assert load_config({"repository": str(tmp_path), "evidence": True, "host": host}).evidence
    assert not load_config({"repository": str(tmp_path), "host": "0.0.0.0"}).evidence


def test_the_error_for_a_bad_value_names_its_variable_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "server.yaml", "http_port: 70000\n")
    with pytest.raises(ConfigError, match=r"server\.yaml: 'http_port' is 70000"):
        load_config({"repository": tmp_path}, file)
    monkeypatch.setenv("BF16KIT_GRPC_PORT", "tcp://10.0.0.1:8001")
    with pytest.raises(ConfigError, match=r"^BF16KIT_GRPC_PORT in the environment: 'grpc_port' is 'tcp://10"):
        load_config({"repository": tmp_path})
    monkeypatch.setenv("BF16KIT_LOAD_MODEL", "[minilm")
    with pytest.raises(ConfigError, match=r"'load_model' is '\[minilm': give names with commas between them"):
        load_config({"repository": tmp_path, "grpc_port": 1, "model_control": "explicit"})
    with pytest.raises(ConfigError, match=r"^configuration: 'grpc_port' is -1"):  # the flag overrides the environment
        load_config({"repository": tmp_path, "grpc_port": -1})


def test_an_empty_variable_sets_nothing_but_never_switches_a_protection_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BF16KIT_THREADS", "")
    assert load_config({"repository": tmp_path}).threads is None
    for name, message in (("TOKEN_FILE", ": 'token_file' is '': give a path"), ("CONFIG", " is empty: give a path")):
        monkeypatch.setenv(f"BF16KIT_{name}", "")
        with pytest.raises(ConfigError, match=f"^BF16KIT_{name} in the environment{message}"):
            load_config({"repository": tmp_path})
        monkeypatch.delenv(f"BF16KIT_{name}")


@pytest.mark.parametrize("text", ["minilm,other", " minilm , other ", '["minilm", "other"]'])
def test_a_list_in_a_variable_has_commas_or_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("BF16KIT_LOAD_MODEL", text)
    config = load_config({"repository": tmp_path, "model_control": "explicit"})
    assert config.load_model == ("minilm", "other")


# --- variables that nothing reads -------------------------------------------------------------------------------------


def test_unknown_variables_are_reported_without_their_values_and_many_are_shortened_to_a_count() -> None:
    known = {"PATH": "/bin", "BF16KIT_HTTP_PORT": "9001"}
    unknown = {"BF16KIT_GRPC_PROT": "9000", "BF16KIT_PASSWORD": "hunter2", "BF16KIT_PORT": "9000"}
    assert unknown_variables(known | unknown) == (
        "unknown environment variables are ignored: 'BF16KIT_GRPC_PROT' (did you mean BF16KIT_GRPC_PORT?),"
        " 'BF16KIT_PASSWORD', 'BF16KIT_PORT'; docs/configuration.md names every setting"
    )
    assert "and 3 more" in unknown_variables({f"BF16KIT_X{number}": "" for number in range(8)})


def test_every_setting_and_other_known_variable_is_accepted_and_those_of_kubernetes_are() -> None:
    others = ("CONFIG", "KERNEL_PATH", "TOKEN", "HEALTH_CERTIFICATE", "HEALTH_KEY", "TENSORFLOW_PYTHON")
    names = [f"BF16KIT_{name}".upper() for name in (*ServerConfig.model_fields, *others)]
    kubernetes = {
        "BF16KIT_SERVICE_HOST": "10.0.0.1",
        "BF16KIT_METRICS_SERVICE_PORT_HTTP": "8002",
        "BF16KIT_PORT": "tcp://10.0.0.1:8001",
        "BF16KIT_PORT_8001_TCP_PROTO": "tcp",
        "BF16KIT_METRICS_PORT_8002_TCP_ADDR": "10.0.0.2",
    }
    assert unknown_variables(dict.fromkeys([*names, "bf16kit_grpc_port"], "x") | kubernetes) == ""
