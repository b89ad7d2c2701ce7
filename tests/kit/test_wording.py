"""Messages of libraries, shortened to what is useful to users."""

import os
import time

import pytest

from bf16kit.messages.wording import brief, first_line, os_error_text, printable, quoted, size, table


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (
            "[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/.1.tmp-7/cpu.onnx failed:Node (gemm) Op (Gemm) dims",
            "FAIL: Node (gemm) Op (Gemm) dims",
        ),
        (
            "Exception during initialization: /onnxruntime_src/onnxruntime/core/rnn/lstm_base.h:24"
            " onnxruntime::LSTMBase::LSTMBase(const onnxruntime::OpKernelInfo&) hidden_size > 0 was false.",
            "Exception during initialization: hidden_size > 0 was false.",
        ),
        ("Unrecognized attribute: axis\n\n==> Context: Bad node spec for node.", "Unrecognized attribute: axis"),
        (
            "[enforce fail at inline_container.cc:340] . file not in a subdirectory",
            "[enforce fail at file not in a subdirectory",
        ),
        (
            "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running If node."
            " Name:'choice' Status Message: Non-zero status code returned while running MatMul node."
            " Name:'product' Status Message: INVALID_ARGUMENT: the computed shape is {7,17}",
            "If 'choice': MatMul 'product': INVALID_ARGUMENT: the computed shape is {7,17}",
        ),
        ("a\n  b\tc", "a b c"),
        (
            "'__torch__.Conv2d (of Python compilation unit at: 0x55b08a8643b0)' has no 'input'; <m at 0x7f00aa00>",
            "'__torch__.Conv2d' has no 'input'; <m at …>",
        ),
        (
            'name.find(delimiter_) == std::string::npos INTERNAL ASSERT FAILED at "/pytorch/a.cpp":42, please report a'
            " bug to PyTorch.\nwhile loading",
            "an assertion inside PyTorch failed while loading",
        ),
    ],
)
def test_places_in_a_librarys_sources_are_removed(said: str, left: str) -> None:
    assert brief(said) == left


def test_the_first_line_of_an_error_has_no_memory_address() -> None:
    said = "'Conv2d (of Python compilation unit at: 0x55b08a8643b0)' has no attribute 'input'; 0x1.8p3\nDid you forget"
    assert first_line(RuntimeError(said)) == "'Conv2d' has no attribute 'input'; 0x1.8p3"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_an_error_about_permissions_names_the_user() -> None:
    assert os_error_text(PermissionError(13, "Permission denied")) == f"Permission denied to user {os.geteuid()}"
    assert os_error_text(OSError(30, "Read-only file system")) == "Read-only file system"
    assert os_error_text(OSError("no number")) == "no number"


def test_a_long_text_is_cut_and_takes_no_time() -> None:
    """A search for places in the whole text took 6 s and blocked all other threads."""
    assert brief("one two " * 200, 20) == "one two one two one…"
    assert brief("a" * 299) == "a" * 299
    assert brief("x" * 5000) == f"{'x' * 40}…{'x' * 40}"
    begun = time.process_time()
    for text in ("x" * 70_000, "x " * 500_000, "/a/b.cc:12 f(" + "(" * 70_000):
        assert len(brief(text)) <= 320
    assert len(brief("one two " * 200)) == 320
    assert time.process_time() - begun < 1


def test_a_value_is_quoted_by_its_start_whatever_its_size() -> None:
    nested: list[object] = [0]
    for _ in range(100):
        nested = [nested] * 10  # 10^100 values
    for value in (nested, "x" * 10**6, 1 << 10_000, ["x" * 10**6] * 10**6, {str(n): n for n in range(1000)}):
        assert len(quoted(value)) <= 110
    assert quoted("it's\n") == '"it\'s\\n"'
    assert quoted("\0" * (64 << 20)) == "'" + "\\x00" * 100 + "'…"
    assert [quoted(value) for value in ("a", 5, -1.5, None, True, [1, "b"], {"a": 1})] == [
        *("'a'", "5", "-1.5", "None", "True", "[1, 'b']", "{'a': 1}")
    ]


def test_a_table_shows_three_digits_whole_names_and_markup_literally_below_a_title_of_one_line() -> None:
    title = "Drift from the fp32 reference on " + "many samples, " * 10
    shown = table(title, ("a", "b", "c"), [(0.123456, None, 123456), ("[bold]x[/bold]\x1b[31m\r\n", "y" * 500, "end")])
    assert shown.splitlines()[0] == title
    for text in ("0.123", "–", "123456", "[bold]x[/bold]\\x1b[31m\\r\\n", "end"):
        assert text in shown
    assert shown.removeprefix(title).count("y") == 500


def test_control_characters_except_line_ends_are_escaped_and_sizes_have_decimal_units() -> None:
    assert printable("é\x1b\n\udcff") == "é\\x1b\n\\udcff"
    found = [size(count) for count in (0, 1000, 90_868_376, 7e9, 3e15)]
    assert found == ["0 bytes", "1.0 kB", "90.9 MB", "7.0 GB", "3000.0 TB"]
