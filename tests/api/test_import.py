"""``import bf16kit`` takes no time: what is heavy is imported when it is used."""

import subprocess
import sys

import pytest

import bf16kit

_HEAVY = "numpy torch onnx onnxruntime pydantic grpc rich click"


def test_importing_the_package_imports_nothing_else() -> None:
    program = f"import sys, bf16kit; dir(bf16kit); print([n for n in {_HEAVY.split()} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_is_found_when_it_is_used_and_an_unknown_one_is_not() -> None:
    for name in bf16kit.__all__:
        assert getattr(bf16kit, name) is not None
    assert dir(bf16kit) == sorted(bf16kit.__all__)
    with pytest.raises(AttributeError, match="module 'bf16kit' has no attribute 'covert'"):
        _ = bf16kit.covert
