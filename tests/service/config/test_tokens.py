import gc
import hmac
import logging
import os
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from waiting import until

from bf16kit.messages.errors import ConfigError
from bf16kit.service.config import reloadedfiles
from bf16kit.service.config.tokens import SCOPES, Scope, TokenFile, read_tokens

READER = "reader-0123456789abcdef"
ADMIN = "admin+0123456789/abcdef=="


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who may what\n\n{READER} read\n  {ADMIN}\tinfer,read,manage  # the operator\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
def test_a_token_has_its_scopes(path: Path, scheme: str) -> None:
    tokens = TokenFile(path)
    assert tokens.scopes(scheme + READER) == frozenset[Scope](["read"])
    assert tokens.scopes(scheme + ADMIN) == frozenset(SCOPES)


@pytest.mark.parametrize(
    "authorization",
    [
        "", "Bearer", "Bearer ", READER, f"Basic {READER}", f"Bearer {READER}x", f"Bearer {READER[:-1]}",
        f"Bearer {READER}, Bearer {ADMIN}", "Bearer \udcff\u20ac", f"Bearer {READER} read",
    ],
)  # fmt: skip
def test_any_other_header_has_no_scopes(path: Path, authorization: str) -> None:
    assert TokenFile(path).scopes(authorization) is None


def test_every_token_is_compared_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two tokens takes as many comparisons as the last, or as an unknown one."""
    tokens, compared = TokenFile(path), list[int]()
    real = hmac.compare_digest

    def count(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", count)
    for token in (READER, ADMIN, "x", "x" * 5000):
        compared.clear()
        tokens.scopes_of(token)
        assert compared == [32, 32]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no token"),
        ("# nothing\n", "holds no token"),
        (READER, "line 1: expected 'token scope.*found 1 words"),
        (f"{READER} read write\n", "line 1: expected .* found 3 words"),
        (f"\n{READER} write\n", "line 2: give scopes out of infer, read, manage"),
        (f"{READER} read,read\n", "give scopes out of"),
        (f"{READER} read,\n", "give scopes out of"),
        ("short read\n", "the token has 5 characters; give 16 or more"),
        ("with:colon-0123456789 read\n", "a token may contain only letters"),
        (f"{READER} read\n{READER} infer\n", "line 2: this token was given before"),
        ("\u00e9" * 20 + " read\n", "is not ASCII"),
        ("a" * 2**21, "is over 1048576 bytes"),
    ],
)
def test_an_invalid_file_is_rejected_without_quoting_its_tokens(path: Path, content: str, message: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as refused:
        TokenFile(path)
    assert READER not in str(refused.value)


def test_a_missing_file_is_rejected_a_pipe_is_not_waited_for_and_one_that_every_user_can_read_gets_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(path.with_name("pipe"))
    for name, why in (("gone", "No such file"), ("pipe", "it is not a regular file")):
        for read in (TokenFile, read_tokens):
            with pytest.raises(ConfigError, match=f"token_file .*{name}: cannot be read: {why}"):
                read(path.with_name(name))
    TokenFile(path)
    assert caplog.text == ""
    path.chmod(0o644)
    TokenFile(path)
    assert "can be read by every user (mode 644); chmod o-r it" in caplog.text


def test_a_valid_change_takes_effect_and_a_broken_one_does_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reloadedfiles, "CHECK_SECONDS", 0.01)
    tokens = TokenFile(path)

    def write(content: str) -> None:
        new = path.with_name("new")
        new.write_text(content)
        new.rename(path)  # at once: an empty file would be obeyed

    write(f"{READER} inf")
    until(lambda: "the tokens cannot be read again; the old ones stay in force" in caplog.text)
    assert tokens.scopes_of(READER) == frozenset[Scope](["read"])
    write(f"{READER} infer,read\n")
    until(lambda: tokens.scopes_of(READER) == frozenset[Scope](["infer", "read"]))
    assert tokens.scopes_of(ADMIN) is None
    write("# all are revoked\n")
    until(lambda: tokens.scopes_of(READER) is None)
    assert "every request that needs a token is rejected" in caplog.text


def test_no_token_is_kept_or_logged_in_plain_text(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tokens = TokenFile(path)
    tokens.scopes(f"Bearer {READER}")
    assert READER not in caplog.text
    held, seen = [tokens], set[int]()
    while held:  # all that the object refers to, but no code, whose globals hold this test's own token
        each = held.pop()
        if id(each) not in seen and not isinstance(each, (type, FunctionType, ModuleType)):
            seen.add(id(each))
            assert not (isinstance(each, (str, bytes)) and READER in repr(each))
            held += gc.get_referents(each)
