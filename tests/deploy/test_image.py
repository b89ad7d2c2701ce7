"""The images themselves, built and run on a Docker engine: what they hold, and that they need nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_mlp
from dockerfiles import pins
from imagelayers import differing
from waiting import until

import bf16kit

pytestmark = pytest.mark.compose
ROOT = Path(__file__).parents[2]
MOST_BYTES = 350e6  # of the server without torch, beyond its base
LISTED = """
import importlib.metadata, json
print(json.dumps({found.name: found.version for found in importlib.metadata.distributions()}))
"""
SHELLS = (
    "import glob, os; [os.remove(p) for d in ('/bin', '/usr/bin') for p in glob.glob(d + '/*sh') if os.path.lexists(p)]"
)
# What its user may write where the file system is not read-only, system directories apart.
WRITABLE = """
import os
def may(path):
    return os.access(path, os.W_OK) and not os.path.islink(path)
skipped = {"/proc", "/sys", "/dev"}
found = []
for directory, directories, files in os.walk("/"):
    directories[:] = [name for name in directories if os.path.join(directory, name) not in skipped]
    found += [path for path in (directory, *(os.path.join(directory, name) for name in files)) if may(path)]
print(sorted(found))
"""
TOOLS = ("gcc", "g++", "cc", "c++", "ld", "make", "cmake", "git", "curl", "wget")
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")


def docker(*arguments: str, stdin: str = "", fails: bool = False) -> str:
    """What ``docker …`` wrote on its standard output; the test fails, with the rest, when it does."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, env=environment, input=stdin, capture_output=True, text=True, check=False
    )
    if (done.returncode != 0) is not fails:
        pytest.fail(
            f"docker {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.stderr if fails else done.stdout.strip()


def inspect(what: str, format_: str) -> Any:
    return json.loads(docker("inspect", "--format", f"{{{{json {format_}}}}}", what))


@dataclass(frozen=True)
class Images:
    """Of a name of this run's own; layers come from the engine's cache."""

    name: str

    def build(self, target: str, *flags: str, tag: str = "") -> str:
        extra = ("--build-arg", f"PIP_EXTRA_INDEX_URL={os.environ.get('PIP_EXTRA_INDEX_URL', '')}")
        image = f"{self.name}:{tag or target}"
        docker("build", "--quiet", "--target", target, "--tag", image, *extra, *flags, ".")
        return image

    def remove(self) -> None:
        """By name: an ID is also that of an image of yours built from the same tree, which would go as well."""
        for image in docker("images", "--format", "{{.Repository}}:{{.Tag}}", self.name).split():
            docker("rmi", "--force", image)


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker engine answers here")
    images = Images(f"bf16kit-test-{uuid.uuid4().hex[:8]}")
    try:
        yield images
    finally:
        images.remove()


@pytest.fixture(scope="module")
def server(images: Images) -> str:
    return images.build("server", "--build-arg", "REVISION=0123abc")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_mlp(root / "mlp" / "1")
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


@dataclass(frozen=True)
class Container:
    """A running one."""

    id: str

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", "exec", self.id, *command], capture_output=True, text=True, check=False)

    @property
    def health(self) -> str:
        return str(inspect(self.id, ".State.Health.Status"))

    @property
    def checked(self) -> str:
        """What the last health check said."""
        log = inspect(self.id, ".State.Health.Log")
        return str(log[-1]["Output"]) if log else ""


@pytest.fixture
def start(repository: Path) -> Iterator[Any]:
    """Starts an image as the compose file and the documentation do; removed afterwards."""
    started: list[str] = []

    def run(image: str, *flags: str) -> Container:
        given = ("--volume", f"{repository}:/models:ro", *HARDENED, *flags)
        started.append(docker("run", "--detach", *given, image))
        return Container(started[-1])

    yield run
    for container in started:
        docker("rm", "--force", container)


def test_images_of_a_run_are_removed_and_not_those_that_are_the_same(images: Images) -> None:
    run = Images(f"{images.name}-removed")
    for name in (f"{run.name}:one", f"{images.name}:kept"):
        docker("build", "--quiet", "--tag", name, "-", stdin="FROM scratch\nLABEL of=both\n")
    run.remove()
    assert docker("images", "--quiet", run.name) == ""
    assert docker("images", "--quiet", f"{images.name}:kept") != ""


def test_labels_tell_version_and_revision(server: str) -> None:
    labels = inspect(server, ".Config.Labels")
    assert labels["org.opencontainers.image.version"] == bf16kit.__version__
    assert labels["org.opencontainers.image.revision"] == "0123abc"
    assert labels["org.opencontainers.image.title"] == "bf16kit server, cpu"


def test_the_server_without_torch_is_small(images: Images, server: str) -> None:
    base = images.build("build", tag="base")  # which the engine then has, whatever PYTHON_IMAGE is
    layers, below = (inspect(image, ".RootFS.Layers") for image in (server, base))
    shared = [layer for layer, other in zip(layers, below, strict=False) if layer == other]
    history = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", server)
    sizes = [int(line.split(" ", 1)[0]) for line in history.splitlines() if "COPY /layer" in line]
    assert len(sizes) == len(layers) - len(shared) == 2
    assert sum(sizes) <= MOST_BYTES


def test_only_constrained_versions_are_in_it(server: str) -> None:
    held = json.loads(docker("run", "--rm", "--entrypoint", "python", server, "-c", LISTED))
    known = pins(ROOT / "constraints.txt") | {"bf16kit": bf16kit.__version__}
    found = {name.replace("_", "-").replace(".", "-").lower(): version for name, version in held.items()}
    assert {name: version for name, version in found.items() if known.get(name) != version} == {}
    assert {"torch", "transformers", "pip", "setuptools"} & found.keys() == set()


@pytest.mark.parametrize("target", ["server", "converter"])
def test_the_bill_of_an_image_lists_its_packages_and_debians(images: Images, target: str, tmp_path: Path) -> None:
    extra = ("--build-arg", f"PIP_EXTRA_INDEX_URL={os.environ.get('PIP_EXTRA_INDEX_URL', '')}")
    docker("build", "--quiet", "--target", f"bill-of-{target}", "--output", str(tmp_path), *extra, ".")
    bill = json.loads((tmp_path / f"{target}.cdx.json").read_text("utf-8"))
    image = images.build(target)
    held = json.loads(docker("run", "--rm", "--entrypoint", "python", image, "-c", LISTED))
    listed = {c["name"]: c["version"] for c in bill["components"] if c.get("purl", "").startswith("pkg:pypi/")}
    listed |= {c["name"]: c["version"] for c in bill["components"] if c["name"] == "bf16kit"}
    assert listed == held
    dpkg = ("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev} ${Package}\\n")
    packages = docker("run", "--rm", "--entrypoint", dpkg[0], image, *dpkg[1:]).splitlines()
    installed = sorted(line.split()[1] for line in packages if line.startswith("ii"))
    debian = sorted(c["name"] for c in bill["components"] if c.get("purl", "").startswith("pkg:deb/"))
    assert debian == installed


def test_it_runs_and_is_healthy_without_any_shell(images: Images, server: str, start: Any) -> None:
    """And on a file system that it cannot write. The health check is the image's own, run by the engine."""
    text = f'FROM {server}\nUSER 0\nRUN ["python", "-c", "{SHELLS}"]\nUSER 10001:10001\n'
    shellless = f"{images.name}:shellless"
    docker("build", "--quiet", "--tag", shellless, "-", stdin=text)
    container = start(shellless, "--health-interval", "1s")
    assert container.run("/bin/sh", "-c", "true").returncode != 0
    until(lambda: container.health == "healthy", 60, "healthy")
    assert container.checked == "SERVING\n"
    assert (
        container.run("python", "-c", "import os; print(os.getuid(), os.access('/', os.W_OK))").stdout
        == "10001 False\n"
    )
    docker("stop", container.id)
    assert inspect(container.id, ".State.ExitCode") == 0


@pytest.mark.parametrize("target", ["server", "converter"])
def test_its_user_may_write_where_models_and_scratch_are_and_nowhere_else(images: Images, target: str) -> None:
    """Were the file system not read-only, what it runs could still not be changed."""
    image = images.build(target)
    found = set(ast.literal_eval(docker("run", "--rm", "--entrypoint", "python", image, "-c", WRITABLE)))
    assert "/models" in found
    assert found <= {"/models", "/tmp", "/var/tmp", "/run/lock"}
    assert inspect(image, ".Config.User") == "10001:10001"


@pytest.mark.parametrize("target", ["server", "converter"])
def test_no_tool_to_build_or_fetch_with_is_in_it(images: Images, target: str) -> None:
    code = f"import shutil, json; print(json.dumps([tool for tool in {TOOLS} if shutil.which(tool)]))"
    assert json.loads(docker("run", "--rm", "--entrypoint", "python", images.build(target), "-c", code)) == []


def test_a_server_that_is_not_ready_is_unhealthy_and_says_so(server: str, start: Any, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    flags = (
        "--health-interval",
        "1s",
        "--health-retries",
        "1",
        "--health-start-period",
        "1s",
    )  # 0 is as the image has it
    container = start(server, *flags, "--volume", f"{tmp_path}/models:/empty:ro", "--env", "BF16KIT_GRPC_PORT=8003")
    until(lambda: container.health == "healthy", 60, "healthy")  # on the port that its environment says
    empty = docker("run", "--detach", *HARDENED, *flags, "--volume", f"{tmp_path}/models:/models:ro", server)
    try:
        until(lambda: Container(empty).health == "unhealthy", 60, "unhealthy")
        until(lambda: "NOT_SERVING: server is not ready" in Container(empty).checked, 30, "the reason")
    finally:
        docker("rm", "--force", empty)


def test_what_it_imports_was_compiled_when_it_was_built(server: str) -> None:
    """Python's own modules as well, which official images leave to be compiled at each start."""
    code = """
import os, sys, service.alone, service.transport.server, onnxruntime, onnx
cached = {name: getattr(getattr(module, "__spec__", None), "cached", None) for name, module in sys.modules.items()}
print([name for name, file in cached.items() if file and not os.path.exists(file)], len(cached) > 500)
"""
    assert docker("run", "--rm", "--entrypoint", "python", server, "-c", code) == "[] True"


def test_an_unknown_variant_is_refused_in_words() -> None:
    said = docker("build", "--target", "server", "--build-arg", "VARIANT=tpu", ".", fails=True)
    assert "VARIANT 'tpu' is unknown; give cpu, cpu-torch or gpu" in said


def test_the_context_holds_nothing_that_is_not_built_from(tmp_path: Path) -> None:
    """A copy of the tree's skeleton, with secrets and leavings planted in it."""
    (tmp_path / ".dockerignore").write_bytes((ROOT / ".dockerignore").read_bytes())
    planted = (
        *(".git/config", ".venv/bin/python", "build/x", ".env", "id_rsa", "tests/x", "deploy/demo/.git/config"),
        *("service/.env", "service/tls.key", "service/__pycache__/x.pyc", "bf16kit/x.pem", "bf16kit/runtime/x.so"),
    )
    wanted = ("bf16kit/__init__.py", "service/cli.py", "kernels/ort/x.cpp", "deploy/demo/x.py", "pyproject.toml")
    for name in (*planted, *wanted):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x", "utf-8")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n", "utf-8")
    docker("build", "--quiet", "--output", str(tmp_path / "seen"), str(tmp_path))
    seen = {str(path.relative_to(tmp_path / "seen")) for path in (tmp_path / "seen").rglob("*") if path.is_file()}
    assert seen == set(wanted)


def test_two_builds_give_the_same_layers(images: Images, server: str, tmp_path: Path) -> None:
    """The second is made without the engine's cache. The image's ID differs: it has the time of the build in it."""
    again = images.build("server", "--no-cache", tag="again")
    same = inspect(again, ".RootFS.Layers") == inspect(server, ".RootFS.Layers")
    assert same, "\n".join(differing(server, again, tmp_path))
