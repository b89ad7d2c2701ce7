"""Build the images and run them on a Docker engine: check their content, and that they need nothing else."""

import ast
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from platform import machine
from typing import Any

import composing
import pytest
from artifacts import write_mlp
from composing import ROOT, output_of
from pins import pins
from waiting import until

import bf16kit

pytestmark = pytest.mark.compose
MOST_BYTES = 350e6  # of the server without torch, beyond its base
LISTED = """
import importlib.metadata, json
print(json.dumps({found.name: found.version for found in importlib.metadata.distributions()}))
"""
SHELLS = (
    "import glob, os; [os.remove(p) for d in ('/bin', '/usr/bin') for p in glob.glob(d + '/*sh') if os.path.lexists(p)]"
)
# Lists what the image's user may write if the file system is not read-only, except in system directories.
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
FILES = """
import hashlib, os
for directory, _, files in sorted(os.walk("/opt")):
    for path in (os.path.join(directory, name) for name in sorted(files)):
        print(path, os.stat(path).st_mtime, hashlib.sha256(open(path, "rb").read()).hexdigest())
"""
TOOLS = ("gcc", "g++", "cc", "c++", "ld", "make", "cmake", "git", "curl", "wget")
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")


def docker(*arguments: str, stdin: str = "") -> str:
    """Return the standard output of ``docker …``; fail the test, with both outputs, if the command fails."""
    return output_of(composing.docker(*arguments, stdin=stdin))


def inspect(what: str, format_: str) -> Any:
    return json.loads(docker("inspect", "--format", f"{{{{json {format_}}}}}", what))


@dataclass(frozen=True)
class Images:
    """Images under a name of this test run; their layers come from the engine's cache."""

    name: str

    def build(self, target: str, *flags: str, tag: str = "") -> str:
        extra = ("--build-arg", f"PIP_EXTRA_INDEX_URL={os.environ.get('PIP_EXTRA_INDEX_URL', '')}")
        image = f"{self.name}:{tag or target}"
        docker("build", "--quiet", "--target", target, "--tag", image, *extra, *flags, ".")
        return image

    def remove(self) -> None:
        """Remove the images by name: by ID, this would also remove a developer's image built from the same tree."""
        for image in docker("images", "--format", "{{.Repository}}:{{.Tag}}", self.name).split():
            docker("rmi", "--force", image)


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    if composing.docker("info").returncode != 0:
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
    """A running container."""

    id: str

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return composing.docker("exec", self.id, *command)

    @property
    def health(self) -> str:
        return str(inspect(self.id, ".State.Health.Status"))

    @property
    def checked(self) -> str:
        """Return the output of the last health check."""
        log = inspect(self.id, ".State.Health.Log")
        return str(log[-1]["Output"]) if log else ""


@pytest.fixture
def start(repository: Path) -> Iterator[Any]:
    """Yield a function that starts an image as the compose file does; remove the containers afterwards."""
    started: list[str] = []

    def run(image: str, *flags: str) -> Container:
        given = ("--volume", f"{repository}:/models:ro", *HARDENED, *flags)
        started.append(docker("run", "--detach", *given, image))
        return Container(started[-1])

    yield run
    for container in started:
        docker("rm", "--force", container)


def test_labels_have_version_and_revision(server: str) -> None:
    labels = inspect(server, ".Config.Labels")
    assert labels["org.opencontainers.image.version"] == bf16kit.__version__
    assert labels["org.opencontainers.image.revision"] == "0123abc"
    assert labels["org.opencontainers.image.title"] == "bf16kit server, cpu"


def test_the_server_without_torch_is_small(images: Images, server: str) -> None:
    base = images.build("build", tag="base")  # so that the engine has the base, whatever PYTHON_IMAGE is
    layers, below = (inspect(image, ".RootFS.Layers") for image in (server, base))
    shared = [layer for layer, other in zip(layers, below, strict=False) if layer == other]
    history = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", server)
    sizes = [int(line.split(" ", 1)[0]) for line in history.splitlines() if "COPY /layer" in line]
    assert len(sizes) == len(layers) - len(shared) == 2
    assert sum(sizes) <= MOST_BYTES


def test_the_image_holds_only_constrained_versions(server: str) -> None:
    held = json.loads(docker("run", "--rm", "--entrypoint", "python", server, "-c", LISTED))
    known = pins(ROOT / "constraints.txt") | {"bf16kit": bf16kit.__version__}
    found = {name.replace("_", "-").replace(".", "-").lower(): version for name, version in held.items()}
    assert {name: version for name, version in found.items() if known.get(name) != version} == {}
    assert {"torch", "transformers", "pip", "setuptools"} & found.keys() == set()


@pytest.mark.parametrize("target", ["server", "converter"])
def test_the_bill_of_materials_lists_the_images_python_and_debian_packages(
    images: Images, target: str, tmp_path: Path
) -> None:
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


def test_the_server_is_healthy_without_any_shell_in_the_image(images: Images, server: str, start: Any) -> None:
    """The file system is read-only too. The health check is the image's own, and the engine runs it."""
    text = f'FROM {server}\nUSER 0\nRUN ["python", "-c", "{SHELLS}"]\nUSER 10001:10001\n'
    shellless = f"{images.name}:shellless"
    docker("build", "--quiet", "--tag", shellless, "-", stdin=text)
    container = start(shellless, "--health-interval", "1s")
    assert container.run("/bin/sh", "-c", "true").returncode != 0
    until(lambda: container.health == "healthy", 60, "healthy")
    assert container.checked == "SERVING\n"
    code = "import os; print(os.getuid(), os.access('/', os.W_OK))"
    assert container.run("python", "-c", code).stdout == "10001 False\n"
    docker("stop", container.id)
    assert inspect(container.id, ".State.ExitCode") == 0


@pytest.mark.parametrize("target", ["server", "converter"])
def test_the_images_user_can_write_only_models_and_scratch(images: Images, target: str) -> None:
    """Even if the file system were not read-only, the user could not change the programs."""
    image = images.build(target)
    found = set(ast.literal_eval(docker("run", "--rm", "--entrypoint", "python", image, "-c", WRITABLE)))
    assert "/models" in found
    assert found <= {"/models", "/tmp", "/var/tmp", "/run/lock"}
    assert inspect(image, ".Config.User") == "10001:10001"


@pytest.mark.parametrize("target", ["server", "converter"])
def test_the_image_has_no_build_or_download_tools(images: Images, target: str) -> None:
    code = f"import shutil, json; print(json.dumps([tool for tool in {TOOLS} if shutil.which(tool)]))"
    assert json.loads(docker("run", "--rm", "--entrypoint", "python", images.build(target), "-c", code)) == []


def test_a_server_that_is_not_ready_is_unhealthy_and_the_check_gives_the_reason(
    server: str, start: Any, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    # 0 would mean the image's default
    flags = ("--health-interval", "1s", "--health-retries", "1", "--health-start-period", "1s")
    container = start(server, *flags, "--volume", f"{tmp_path}/models:/empty:ro", "--env", "BF16KIT_GRPC_PORT=8003")
    until(lambda: container.health == "healthy", 60, "healthy")  # on the port from its environment
    empty = docker("run", "--detach", *HARDENED, *flags, "--volume", f"{tmp_path}/models:/models:ro", server)
    try:
        until(lambda: Container(empty).health == "unhealthy", 60, "unhealthy")
        until(lambda: "NOT_SERVING: server is not ready" in Container(empty).checked, 30, "the reason")
    finally:
        docker("rm", "--force", empty)


def test_imported_modules_were_compiled_when_the_image_was_built(server: str) -> None:
    """This includes Python's own modules, which official images compile at each start."""
    code = """
import os, sys, bf16kit.service.server, bf16kit.service.grpc.transport, onnxruntime, onnx
cached = {name: getattr(getattr(module, "__spec__", None), "cached", None) for name, module in sys.modules.items()}
print([name for name, file in cached.items() if file and not os.path.exists(file)], len(cached) > 500)
"""
    assert docker("run", "--rm", "--entrypoint", "python", server, "-c", code) == "[] True"


def test_an_unknown_variant_is_rejected_with_a_clear_message() -> None:
    done = composing.docker("build", "--target", "server", "--build-arg", "VARIANT=tpu", ".")
    assert done.returncode != 0
    assert "VARIANT 'tpu' is unknown; give cpu, cpu-torch, gpu or gpu-torch" in done.stderr


def test_the_build_context_holds_only_files_that_the_build_needs(tmp_path: Path) -> None:
    """The test builds from a small copy of the tree with secrets and leftovers planted in it."""
    (tmp_path / ".dockerignore").write_bytes((ROOT / ".dockerignore").read_bytes())
    planted = (
        *(".git/config", ".venv/bin/python", "build/x", ".env", "id_rsa", "tests/x", "deploy/demo/.git/config"),
        *("service/.env", "service/tls.key", "service/__pycache__/x.pyc", "bf16kit/x.pem", "bf16kit/runtime/x.so"),
    )
    wanted = ("bf16kit/__init__.py", "service/cli.py", "kernels/ort/x.cpp", "deploy/ray/x.py", "pyproject.toml")
    for name in (*planted, *wanted):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x", "utf-8")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n", "utf-8")
    docker("build", "--quiet", "--output", str(tmp_path / "seen"), str(tmp_path))
    seen = {str(path.relative_to(tmp_path / "seen")) for path in (tmp_path / "seen").rglob("*") if path.is_file()}
    assert seen == set(wanted)


def test_the_kernel_for_another_processor_is_cross_compiled(tmp_path: Path) -> None:
    """Without an emulator: only the stage `kernel` is built, of one small file, and told that the image's machine is
    another."""
    other, number = ("x86_64", 62) if machine() == "aarch64" else ("aarch64", 183)  # e_machine of an ELF file
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("uname -m >/machine", f"echo {other} >/machine")
    (tmp_path / "kernels" / "ort").mkdir(parents=True)
    (tmp_path / "bf16kit").mkdir()
    for name in ("pyproject.toml", "setup.py", "constraints.txt", "bf16kit/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "kernels" / "ort" / "one.cpp").write_text("int one() { return 1; }\n", "utf-8")
    (tmp_path / "Dockerfile").write_text(f"{text}\nFROM scratch AS made\nCOPY --from=kernel /src/build /\n", "utf-8")
    docker("build", "--quiet", "--target", "made", "--output", str(tmp_path / "made"), str(tmp_path))
    (library,) = (tmp_path / "made").glob(f"lib.linux-{other}-*/bf16kit/runtime/_bf16kernel.so")
    assert library.read_bytes()[18] == number


def test_two_builds_give_the_same_layers(images: Images, server: str) -> None:
    """The second build does not use the engine's cache for these stages, whose files are the layers. The kernel is not
    compiled again: test_distributions.py checks that its bytes stay the same. The image IDs differ, because an ID
    includes the build time."""
    again = images.build("server", "--no-cache-filter", "wheel,package,dependencies-server", tag="again")
    files = [
        docker("run", "--rm", "--entrypoint", "python3", image, "-c", FILES).splitlines() for image in (server, again)
    ]
    assert sorted(set(files[0]) ^ set(files[1])) == []
    assert inspect(again, ".RootFS.Layers") == inspect(server, ".RootFS.Layers")
