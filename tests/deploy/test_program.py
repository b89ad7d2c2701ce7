"""Flags, settings, variables, ports, paths, metrics and images that deploy/ names exist in the program."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from exposed import everything_exposed
from manifests import DEPLOY, ROOT, WAYS, Manifest, charted, containers, needs_tools, plain
from scraped import Scraped

from bf16kit.service.cli import main
from bf16kit.service.config.serverconfig import ENV_PREFIX, ServerConfig
from bf16kit.service.http.pages import routes

pytestmark = pytest.mark.manifests
FILES = [path for path in DEPLOY.rglob("*") if path.suffix in {".yaml", ".yml", ".tpl", ".txt", ".json", ".py"}]
FILES += [*ROOT.glob("compose*.yaml"), ROOT / "Dockerfile"]
ADAPTER = DEPLOY / "helm" / "prometheus-adapter.yaml"


def texts() -> Iterator[tuple[Path, str]]:
    for path in FILES:
        yield path, path.read_text("utf-8")


def everywhere() -> list[Manifest]:
    """Return the manifests of every way to deploy on Kubernetes."""
    return [*(each for flags in WAYS.values() for each in charted(*flags)), *plain()]


def arguments() -> Iterator[list[str]]:
    """Yield the arguments that the server is started with: by manifests, by the image alone, and by compose.yaml."""
    for container in containers(everywhere()):
        if container["name"] != "convert":
            assert "command" not in container  # so the image's entry point runs
            yield container["args"]
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    found = re.findall(r'^ENTRYPOINT \["bf16-serve"\]\nCMD (\[.*\])$', dockerfile, re.MULTILINE)
    assert found
    yield from map(json.loads, found)
    for path in ROOT.glob("compose*.yaml"):
        for service in yaml.safe_load(path.read_text("utf-8"))["services"].values():
            if str(service.get("image", "")).startswith("bf16kit:server"):
                yield [str(each) for each in service.get("command", ())]


@needs_tools
def test_the_server_accepts_every_argument() -> None:
    """The test parses the arguments with the server's own command line."""
    seen = set()
    for given in arguments():
        seen.update(given)
        main.make_context("bf16-serve", list(given))
    assert {"--config=/etc/bf16kit/server.yaml", "--repository=/mnt/models"} <= seen


def test_a_removed_argument_is_rejected() -> None:
    with pytest.raises(click.NoSuchOption):
        main.make_context("bf16-serve", ["--model-name=m", "--repository=/mnt/models"])


@needs_tools
def test_the_server_accepts_every_settings_file() -> None:
    found = [each["data"]["server.yaml"] for each in everywhere() if each["kind"] == "ConfigMap"]
    assert len(found) == len(WAYS)
    for text in found:
        config = ServerConfig(**yaml.safe_load(text))
        assert config.drain_seconds > 0
        assert config.evidence is False


def test_the_program_reads_every_variable_named_in_deploy() -> None:
    settings = {f"{ENV_PREFIX}{key.upper()}" for key in (*ServerConfig.model_fields, "config")}
    sources = [
        ROOT / "setup.py",
        *(path for top in ("bf16kit", "converter", "service") for path in (ROOT / top).rglob("*.py")),
    ]
    code = "\n".join(path.read_text("utf-8") for path in sources)
    named = {(word, path.name) for path, text in texts() for word in re.findall(r"\bBF16KIT_[A-Z][A-Z_]+\b", text)}
    assert [each for each in named if each[0] not in settings and f'"{each[0]}"' not in code] == []
    assert {"BF16KIT_DRAIN_SECONDS"} <= {word for word, _ in named}


def test_every_metric_exists_in_the_server_or_a_rule() -> None:
    rules = [yaml.safe_load(path.read_text("utf-8")) for path in (DEPLOY / "prometheus" / "rules").glob("*.yml")]
    recorded = [rule for file in rules for group in file["groups"] for rule in group["rules"] if "record" in rule]
    there = Scraped(everything_exposed(), recorded)
    made = {rule["name"]["as"] for rule in yaml.safe_load(ADAPTER.read_text("utf-8"))["rules"]["custom"]}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in there.labels}
    word = re.compile(
        r"(?<![\w.*/])bf16kit(?:_|:(?=\w+:))[a-z][a-z0-9_:]*[a-z0-9]\b"
    )  # a recorded metric has two colons, an image name has one
    named = {(name, path.name) for path, text in texts() for name in word.findall(text)}
    unknown = [each for each in named if each[0] not in {*there.labels, *families, *made}]
    assert unknown == []
    assert made <= {word for word, name in named if name == "horizontalpodautoscaler.yaml"}


def test_every_path_exists_on_the_http_port() -> None:
    nothing: Any = None
    answered = set(routes(nothing, nothing, nothing))
    named: set[str] = set()
    for path, text in texts():
        if path.suffix != ".py":
            named |= set(re.findall(r"(?<![\w/.}-])(/(?:metrics|livez|readyz|healthz|status\.json|watch)\b)", text))
    assert {"/metrics", "/livez", "/readyz"} <= named <= answered


def images() -> Iterator[str]:
    """Yield every image of this project that is deployed."""
    for container in containers(everywhere()):
        yield container["image"]
    for path in ROOT.glob("compose*.yaml"):
        services = yaml.safe_load(path.read_text("utf-8"))["services"].values()
        yield from (service["image"] for service in services if service.get("image", "").startswith("bf16kit"))


@needs_tools
def test_make_image_builds_every_deployed_image() -> None:
    built = set(re.findall(r"\$\(IMAGE\):([\w.-]+)", (ROOT / "Makefile").read_text("utf-8")))
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    variants = re.findall(r"^\s+([\w-]+)\) extras=", dockerfile, re.MULTILINE)
    built |= {f"server-{variant}" for variant in variants}
    assert set(images()) <= {f"bf16kit:{tag}" for tag in built}
    assert {"bf16kit:server", "bf16kit:server-gpu", "bf16kit:converter"} <= set(images())


@needs_tools
def test_the_demos_command_is_in_the_converter_image() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    (source, target), *_ = re.findall(r"^COPY (deploy/demo) (\S+)$", dockerfile, re.MULTILINE)
    run = [each["command"] for each in containers(everywhere()) if "command" in each]
    assert run == [["python", f"{target.removeprefix('/layer')}/publish.py"]]
    assert (ROOT / source / "publish.py").is_file()
    assert set(re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE)) == {"10001:10001"}
