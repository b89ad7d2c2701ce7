"""Properties of the Dockerfile that can be checked without an engine; ``test_image.py`` checks the others."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from dockerfiles import Dockerfile, pins

import bf16kit

ROOT = Path(__file__).parents[2]
FILE = Dockerfile(ROOT / "Dockerfile")
IMAGES = ("server", "converter")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_build_has_a_fixed_time_and_hash_seed_and_no_telemetry_and_no_pip() -> None:
    environment = FILE.stages["build"].all("ENV")[0].rest.split()
    assert {"SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH}", "PYTHONHASHSEED=0"} <= set(environment)
    assert re.fullmatch(r"SOURCE_DATE_EPOCH=\d+", FILE.stages["build"].all("ARG")[1].rest)
    assert "ORT_DISABLE_TELEMETRY=1" in FILE.last("runtime", "ENV").rest.split()
    assert [run.rest for run in FILE.stages["build"].all("RUN")] == ["python3 -m venv --without-pip /opt/bf16kit"]


def test_the_build_names_no_processor() -> None:
    """The same file builds for linux/amd64 and linux/arm64: what differs, pip and apt choose."""
    text = "".join(
        (ROOT / name).read_text("utf-8") for name in ("Dockerfile", "deploy/image/bill.txt", "constraints.txt")
    )
    assert re.findall(r"(?i)x86|i386|amd64|aarch64|arm64|manylinux|-linux-gnu|\.whl\b|TARGETARCH", text) == []


def test_the_default_version_is_the_packages() -> None:
    """`make image` passes the version; `docker compose build` does not, and then this default applies."""
    given = [argument.rest for stage in FILE.stages.values() for argument in stage.all("ARG")]
    assert {argument for argument in given if argument.startswith("VERSION=")} == {f"VERSION={bf16kit.__version__}"}


def test_installs_use_the_constraints_and_pip_does_not_compile() -> None:
    environment = " ".join(instruction.rest for instruction in FILE.stages["build"].all("ENV"))
    assert "PIP_CONSTRAINT=/src/constraints.txt" in environment  # also for the packages that build ours
    assert "PIP_COMPILE=0" in environment  # PIP_NO_COMPILE=1 would make pip compile
    for stage in FILE.stages.values():
        if any("pip " in run.rest for run in stage.all("RUN")):
            assert FILE.line(stage.name)[-1].name == "build", stage.name


def test_constraints_and_tools_are_exact() -> None:
    pinned = pins(ROOT / "constraints.txt")
    assert {"setuptools", "onnxruntime", "onnxruntime-gpu", "torch"} <= pinned.keys()
    assert pinned["onnxruntime"] == pinned["onnxruntime-gpu"]  # one version of the runtime, tested once
    assert "cyclonedx-bom" in pins(ROOT / "deploy" / "image" / "bill.txt")


def test_variants_use_existing_extras_and_the_cpu_variant_has_no_torch() -> None:
    (run,) = FILE.stages["dependencies-server"].all("RUN")
    variants = dict(re.findall(r"([a-z-]+)\) extras=([a-z,]+);", run.rest))
    assert variants.keys() == {"cpu", "cpu-torch", "gpu"}
    for extras in variants.values():
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
        assert len({"cpu", "gpu"} & set(extras.split(","))) == 1  # both contain the same package
    brought = [PROJECT["optional-dependencies"][extra] for extra in variants["cpu"].split(",")]
    assert "torch" not in str(brought)
    assert 'echo "VARIANT' in run.rest


# --- the build context ------------------------------------------------------------------------------------------------


def test_the_build_context_excludes_everything_by_default_and_has_no_private_directory() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    ignored = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    assert ignored[0] == "*"
    named = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert {name.split("/")[0] for name in named} & {".git", ".venv", "build", "tests", "bench", ".ci"} == set()
    # A COPY of a path outside the context fails only when an image is built.
    for stage in FILE.stages.values():
        for copy in stage.all("COPY"):
            for source in [] if copy.rest.startswith("--from=") else copy.rest.split()[:-1]:
                assert source == "." or any(f"{source}/".startswith(f"{name}/") for name in named), source


def test_the_wheel_stage_has_what_the_packages_links_lead_to() -> None:
    """A link whose target is not copied leads nowhere in the build, and its package would be missing in the wheel."""
    copied = {copy.rest.split()[0] for copy in FILE.stages["wheel"].all("COPY")}
    links = [path for path in (ROOT / "bf16kit").rglob("*") if path.is_symlink()]
    assert links
    assert {str(link.resolve().relative_to(ROOT)) for link in links} <= copied
