"""What the Dockerfile promises and can be seen without an engine; ``test_image.py`` has what cannot."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import dockerfiles
import pytest
from dockerfiles import pins

import bf16kit

ROOT = Path(__file__).parents[2]
FILE = dockerfiles.read(ROOT / "Dockerfile")
IMAGES = ("server", "converter")
RUNNING = ("runtime", *IMAGES)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.mark.parametrize("name", RUNNING)
def test_nothing_is_run_in_the_stages_that_become_images(name: str) -> None:
    """Only copied: so no layer has the time it was made at, and what runs was never touched by a compiler or pip."""
    assert FILE.stages[name].all("RUN") == []
    assert [copy.rest for copy in FILE.stages[name].all("COPY") if not copy.rest.startswith("--from=")] == []


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_holds_its_own_dependencies_and_the_package(name: str) -> None:
    sources = [copy.rest for copy in FILE.stages[name].all("COPY")]
    assert sources[:2] == [f"--from=dependencies-{name} /layer /", "--from=package /layer /"]
    assert sources[2:] == (["--from=demo /layer /"] if name == "converter" else [])


def test_nothing_that_runs_tells_anybody_and_nothing_is_installed_into_it() -> None:
    assert "ORT_DISABLE_TELEMETRY=1" in FILE.last("runtime", "ENV").rest.split()
    (made,) = [run.rest for run in FILE.stages["build"].all("RUN")]
    assert made == "python3 -m venv --without-pip /opt/bf16kit"


def test_what_is_built_is_told_one_time_and_one_order_of_sets() -> None:
    environment = FILE.stages["build"].all("ENV")[0].rest.split()
    assert {"SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH}", "PYTHONHASHSEED=0"} <= set(environment)
    assert re.fullmatch(r"SOURCE_DATE_EPOCH=\d+", FILE.stages["build"].all("ARG")[1].rest)


@pytest.mark.parametrize("name", IMAGES)
def test_it_runs_as_a_user_without_rights_that_is_a_number(name: str) -> None:
    assert FILE.last(name, "USER").rest == "10001:10001"


@pytest.mark.parametrize("name", IMAGES)
def test_what_starts_needs_no_shell(name: str) -> None:
    assert FILE.last(name, "ENTRYPOINT").words is not None
    assert FILE.last(name, "CMD").words is not None


def test_the_interface_that_manifests_and_compose_files_rely_on() -> None:
    assert FILE.last("server", "ENTRYPOINT").words == ["bf16-serve"]
    assert FILE.last("converter", "ENTRYPOINT").words == ["bf16-convert"]
    assert FILE.last("server", "EXPOSE").rest == "8001 8002"
    assert FILE.last("server", "CMD").words == ["--repository", "/models", "--host", "0.0.0.0"]
    assert "/layer/models" in FILE.stages["package"].all("RUN")[0].rest


def test_the_health_check_asks_for_readiness_over_grpc_without_a_shell() -> None:
    check = FILE.last("server", "HEALTHCHECK")
    assert check.words == ["bf16-serve", "health"]
    (interval,) = re.findall(r"--interval=(\d+)s", check.rest)
    (timeout,) = re.findall(r"--timeout=(\d+)s", check.rest)
    assert (
        5 <= int(timeout) <= int(interval)
    )  # its own patience is 2 s, and then it says why; a busy machine starts it late


@pytest.mark.parametrize("name", IMAGES)
def test_labels_tell_what_an_image_is(name: str) -> None:
    labels = FILE.labels(name)
    for wanted in ("title", "description", "version", "revision", "source", "licenses"):
        assert labels.get(f"org.opencontainers.image.{wanted}"), wanted
    assert labels["org.opencontainers.image.licenses"] == PROJECT["license"]


def test_the_version_is_the_packages() -> None:
    """`make image` gives it; without that, as `docker compose build` does it, it is this one."""
    given = [argument.rest for stage in FILE.stages.values() for argument in stage.all("ARG")]
    assert {argument for argument in given if argument.startswith("VERSION=")} == {f"VERSION={bf16kit.__version__}"}


def test_everything_is_installed_under_the_constraints_and_nothing_is_compiled_at_another_time() -> None:
    environment = " ".join(instruction.rest for instruction in FILE.stages["build"].all("ENV"))
    assert "PIP_CONSTRAINT=/src/constraints.txt" in environment  # for the packages that build ours as well
    assert "PIP_COMPILE=0" in environment  # PIP_NO_COMPILE=1 would have pip compile
    for stage in FILE.stages.values():
        if any("pip " in run.rest for run in stage.all("RUN")):
            assert FILE.line(stage.name)[-1].name == "build", stage.name


def test_constraints_and_tools_are_exact() -> None:
    pinned = pins(ROOT / "constraints.txt")
    assert {"setuptools", "onnxruntime", "onnxruntime-gpu", "torch"} <= pinned.keys()
    assert pinned["onnxruntime"] == pinned["onnxruntime-gpu"]  # one runtime, tested once
    assert "cyclonedx-bom" in pins(ROOT / "deploy" / "image" / "bill.txt")


def test_variants_are_made_of_extras_that_exist_and_the_cpu_one_has_no_torch() -> None:
    (run,) = FILE.stages["dependencies-server"].all("RUN")
    variants = dict(re.findall(r"([a-z-]+)\) extras=([a-z,]+);", run.rest))
    assert variants.keys() == {"cpu", "cpu-torch", "gpu"}
    for extras in variants.values():
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
        assert len({"cpu", "gpu"} & set(extras.split(","))) == 1  # the two hold the same package
    brought = [PROJECT["optional-dependencies"][extra] for extra in variants["cpu"].split(",")]
    assert "torch" not in str(brought)
    assert 'echo "VARIANT' in run.rest


# --- the build context ------------------------------------------------------------------------------------------------


def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def test_the_context_is_empty_but_for_what_is_named() -> None:
    assert ignored()[0] == "*"


def test_what_is_named_exists_and_is_no_secret_place() -> None:
    named = {line.removeprefix("!") for line in ignored() if line.startswith("!")}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert {name.split("/")[0] for name in named} & {".git", ".venv", "build", "tests", "bench", ".ci"} == set()


def test_what_is_copied_is_in_the_context() -> None:
    """A COPY of what the context leaves out fails only when an image is built."""
    named = [line.removeprefix("!") for line in ignored() if line.startswith("!")]
    for stage in FILE.stages.values():
        for copy in stage.all("COPY"):
            sources = [] if copy.rest.startswith("--from=") else copy.rest.split()[:-1]
            for source in sources:
                assert source == "." or any(f"{source}/".startswith(f"{name}/") for name in named), source
