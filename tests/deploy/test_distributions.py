"""What ``make release`` builds: what the wheels and the source distribution hold, and that a wheel works by itself."""

import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from platform import machine

import pytest

import bf16kit

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "environments" / "release"
KERNEL = "bf16kit/runtime/_bf16kernel.so"
NATIVE, ARM = f"manylinux_*_{machine()}", "manylinux_*_aarch64"
MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of an ELF file
MODEL = """
import torch
from converter import WIDTH
from service.sizes import HEIGHT

def make():
    from deploy import DEPTH
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, HEIGHT) for _ in range(DEPTH)))
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def dist() -> Path:
    """Return the directory with the wheels and the source distribution that ``.ci/release packages`` has built."""
    if "DIST" not in os.environ:
        pytest.skip("`make release` runs these tests, on what it has built")
    return ROOT / os.environ["DIST"]


def sources() -> set[str]:
    """Return the tracked files of the package, named as they are when it is installed."""
    found = set()
    for folder in ("bf16kit", "bf16kit/converter/", "bf16kit/service/", "bf16kit/deploy/ray/"):
        target = os.path.relpath((ROOT / folder).resolve(), ROOT)
        named = subprocess.run(["git", "ls-files", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found |= {f"{folder.rstrip('/')}{name.removeprefix(target)}" for name in named.split()}
    return {name for name in found if not (ROOT / name).is_symlink()}


def wheel(dist: Path, platform: str) -> Path:
    found = list(dist.glob(f"bf16kit-{bf16kit.__version__}-py3-none-{platform}.whl"))
    if not found and platform == ARM:
        pytest.skip("there was no compiler for 64-bit Arm: `.ci/release packages` has said so")
    assert len(found) == 1, found
    return found[0]


def content(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.parametrize("platform", [NATIVE, ARM])
def test_the_wheels_hold_exactly_the_package_and_differ_in_the_kernel(dist: Path, platform: str) -> None:
    native, pure = content(wheel(dist, platform)), content(wheel(dist, "any"))
    about = f"bf16kit-{bf16kit.__version__}.dist-info/"
    assert {name for name in pure if not name.startswith(about)} == sources()
    assert {"bf16kit/py.typed", "bf16kit/converter/cli.py", "bf16kit/deploy/ray/front.py"} <= pure.keys()
    assert native.keys() - pure.keys() == {KERNEL}
    assert [name for name in pure if pure[name] != native[name]] == [f"{about}WHEEL", f"{about}RECORD"]
    assert pure[f"{about}top_level.txt"] == b"bf16kit\n"
    assert pure[f"{about}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"bf16-convert" in pure[f"{about}entry_points.txt"]


def test_the_kernel_is_byte_for_byte_that_of_another_build(dist: Path) -> None:
    """``make setup`` has compiled the same sources in another directory."""
    assert content(wheel(dist, NATIVE))[KERNEL] == (ROOT / KERNEL).read_bytes()


@pytest.mark.parametrize("platform", [NATIVE, ARM])
def test_a_wheel_with_the_kernel_runs_wherever_its_dependencies_do(dist: Path, platform: str) -> None:
    """ONNX Runtime's wheels are for glibc 2.27 and newer."""
    found = wheel(dist, platform)
    ((minor, processor),) = re.findall(r"-manylinux_2_(\d+)_(\w+)\.whl", found.name)
    kernel = content(found)[KERNEL]
    needed = [int(version) for version in re.findall(rb"\0GLIBC_2\.(\d+)", kernel)]
    assert 0 < max(needed) <= int(minor) <= 27
    assert struct.unpack_from("<4s14xH", kernel) == (b"\x7fELF", MACHINES[processor])


def test_the_source_distribution_holds_what_it_is_built_from_without_links(dist: Path) -> None:
    with tarfile.open(dist / f"bf16kit-{bf16kit.__version__}.tar.gz") as archive:
        members = {member.name.partition("/")[2]: member for member in archive if not member.isdir()}
    assert [name for name, member in members.items() if not member.isfile()] == []
    names = {name for name in members if not name.startswith("bf16kit.egg-info/")}
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels").glob("[!t]*/*")}
    settings = {"pyproject.toml", "setup.py", "setup.cfg", "constraints.txt", "MANIFEST.in"}
    assert names == sources() | kernels | settings | {"LICENSE", "PKG-INFO", "README.md"}


@pytest.fixture
def source(dist: Path, tmp_path: Path) -> Path:
    """Return the unpacked source distribution."""
    with tarfile.open(dist / f"bf16kit-{bf16kit.__version__}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (found,) = tmp_path.iterdir()
    return found


def test_a_file_that_an_earlier_build_left_is_not_in_the_wheel(dist: Path, source: Path, tmp_path: Path) -> None:
    left = source / "build" / "lib" / "bf16kit"
    for name in ("gone.py", "runtime/_bf16kernel.so"):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_text("")
    environment = {**os.environ, "BF16KIT_BUILD_KERNEL": "0"}
    pip = [sys.executable, "-m", "pip", "--python", str(TOOLS / "bin" / "python")]
    command = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(command, env=environment, check=True)
    assert content(wheel(tmp_path, "any")).keys() == content(wheel(dist, "any")).keys()


@pytest.mark.parametrize("asked", ["", "1"])
def test_a_kernel_of_older_sources_does_not_stay_where_they_cannot_be_compiled(source: Path, asked: str) -> None:
    (source / KERNEL).write_bytes(b"older")
    environment = {**os.environ, "BF16KIT_BUILD_KERNEL": asked, "CC": "false", "CXX": "false"}
    command = [str(TOOLS / "bin" / "python"), "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, (source / KERNEL).exists()) == ((1, True) if asked else (0, False)), done.stderr
    assert asked or f"{KERNEL} is removed: it was built of other sources" in done.stderr


@pytest.fixture
def installed(dist: Path, tmp_path: Path) -> Run:
    """Return a function that runs ``python -m bf16kit`` of a wheel in ``tmp_path``, without this checkout."""

    def run(platform: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(wheel(dist, platform)) as archive:
            archive.extractall(tmp_path / "installed")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
        command = [sys.executable, "-P", "-m", "bf16kit", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(("platform", "path"), [("any", "missing"), (NATIVE, r"(avx|portable)\w*, bf16 products .*")])
def test_a_wheel_says_whether_it_has_the_kernel(installed: Run, platform: str, path: str) -> None:
    assert re.search(rf"^ *CPU kernel +{path}$", installed(platform, "convert", "doctor").stdout, re.MULTILINE)


def test_a_project_with_packages_of_our_folders_names_converts_its_own_model(installed: Run, tmp_path: Path) -> None:
    for name, text in {
        "converter/__init__.py": "WIDTH = 24",
        "service/sizes.py": "HEIGHT = 24",
        "deploy/__init__.py": "DEPTH = 2",
        "mine/models.py": MODEL,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    code = "import torch; from mine.models import make; torch.save(make().state_dict(), 'weights.pt')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."}, check=True)
    done = installed(
        *(
            NATIVE,
            "convert",
            "checkpoint",
            "weights.pt",
            "--model",
            "mine.models:make",
            "--input",
            "x:float32:batch,24",
        ),
        *("--out", "repository/mine/1"),
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "mine")
    checked = installed(NATIVE, "serve", "check", "--repository", "repository")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "profile cpu" in checked.stdout
