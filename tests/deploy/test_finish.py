"""An environment before it becomes a layer: it is made smaller, compiled, and gets the same bytes each time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import finish
import pytest

EPOCH = 1_767_225_600
FINISH = Path(finish.__file__)


def install(root: Path) -> Path:
    """Write an environment /opt/e under ``root``; return its site-packages."""
    packages = root / "opt/e/lib/python3.11/site-packages"
    files = {
        "one/__init__.py": "def words():\n    return {'a', 'b', 'c'}\n",
        "one/tests/test_one.py": "",  # kept: the package is not on the list of those whose tests are removed
        "one/template.py": "{{ this is no Python }}\n",
        "one/one.h": "int one;\n",
        "numpy/__init__.py": "",
        "numpy/linalg/tests/test_linalg.py": "raise SystemExit\n",
        "numpy/_core/include/numpy/ndarray.h": "",
        "onnx/backend/test/data.bin": "x" * 1000,
        "numpy.dist-info/licenses/LICENSE": "yours\n",
        "one/__pycache__/__init__.cpython-311.pyc": "stale",
    }
    for name, text in files.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text, "utf-8")
    (root / "opt/e/bin").mkdir()
    (root / "opt/e/bin/python").symlink_to("/nowhere/python3")
    (root / "opt/e/lib64").symlink_to("lib")
    return packages


def run(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FINISH), "/opt/e", "--under", str(root), *flags]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH), "PYTHONHASHSEED": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layer")
    install(root)
    run(root)
    return root


def test_files_for_tests_and_compilers_are_removed_and_licences_stay(finished: Path) -> None:
    packages = finished / "opt/e/lib/python3.11/site-packages"
    assert sorted(str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()) == [
        "numpy.dist-info/licenses/LICENSE",
        "numpy/__init__.py",
        "one/__init__.py",
        "one/template.py",
        "one/tests/test_one.py",
    ]


def test_modules_are_compiled_to_where_the_image_looks_for_them(finished: Path) -> None:
    compiled = [path.name for path in (finished / "opt/e/bytecode").rglob("*.pyc")]
    tag = sys.implementation.cache_tag
    assert sorted(compiled) == [f"__init__.{tag}.pyc", f"__init__.{tag}.pyc", f"test_one.{tag}.pyc"]
    assert (finished / f"opt/e/bytecode/opt/e/lib/python3.11/site-packages/one/__init__.{tag}.pyc").is_file()


def test_python_runs_the_bytecode_without_comparing_it_with_the_source(tmp_path: Path) -> None:
    """The test changes the source afterwards: Python compares neither its time nor its hash."""
    root = tmp_path / "layer"
    packages = install(root)
    run(root)
    seen = Path("/") / packages.relative_to(root)
    (packages / "one/__init__.py").write_text("raise ImportError('compiled again')\n", "utf-8")
    bytecode = root / "opt/e/bytecode"
    shutil.copytree(bytecode / seen.relative_to("/"), bytecode / packages.relative_to("/"))
    code = "import one; print(sorted(one.words()))"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONPATH": str(packages)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "['a', 'b', 'c']\n", done.stderr


def test_two_runs_give_the_same_bytes_and_the_given_time_for_links_and_directories_too(
    finished: Path, tmp_path: Path
) -> None:
    install(tmp_path)
    run(tmp_path)
    assert contents(tmp_path) == contents(finished)
    assert {path.lstat().st_mtime for path in (finished, *finished.rglob("*"))} == {float(EPOCH)}


@pytest.mark.long  # compiles Python's whole standard library
def test_the_standard_library_is_compiled_and_compared_with_its_source_by_hash(tmp_path: Path) -> None:
    install(tmp_path)
    run(tmp_path, "--standard-library")
    (compiled,) = (tmp_path / "opt/e/bytecode").rglob(f"argparse.{sys.implementation.cache_tag}.pyc")
    assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 0b11  # PEP 552: hash-based and checked
    assert not list((tmp_path / "opt/e/bytecode").rglob("idlelib"))
