"""Bearer tokens and their scopes, from a file that is read again on change.

Tokens are kept as SHA-256 digests, so no traceback, core file or repr shows one. A token is compared with all known
ones, in constant time, so that the response time reveals nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from bf16kit.messages.errors import ConfigError
from bf16kit.messages.wording import os_error_text
from bf16kit.service.config.reloadedfiles import ReloadedFiles, read_regular

_log = logging.getLogger(__name__)
Scope = Literal["infer", "read", "manage"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
SHORTEST = 16  # characters: shorter ones can be guessed
LARGEST_FILE = 1 << 20  # bytes
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750's b64token: what may stand in a header
_CREDENTIALS = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +(\S+) *")

Scopes = frozenset[Scope]
_Table = Mapping[bytes, Scopes]


class TokenFile:
    """A file with ``token scope[,scope]`` on each line; ``#`` begins a comment. Scopes are infer, read and manage.

    Raises :class:`ConfigError` for an invalid file. If the file becomes unusable while the server runs, the old tokens
    stay in force and an error is logged. A file that becomes empty is obeyed: nobody gets in.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: ReloadedFiles[_Table] = ReloadedFiles("the tokens", (path,), self._load)
        if not self._file.current():
            raise ConfigError(f"token_file {path} holds no token; write lines of 'token scope[,scope]'")

    def scopes(self, authorization: str) -> Scopes | None:
        """Return the scopes of this Authorization header; None if it has no token or an unknown one.

        The scopes are never empty: every line of the file has one at least.
        """
        found = _CREDENTIALS.fullmatch(authorization)
        return None if found is None else self.scopes_of(found[1])

    def scopes_of(self, token: str) -> Scopes | None:
        """Return the scopes of a bare token, or None if it is unknown."""
        given_digest = _digest(token)
        granted: Scopes | None = None
        for known, scopes in self._file.current().items():
            if hmac.compare_digest(known, given_digest):  # no early exit: every token costs the same
                granted = scopes
        return granted

    def _load(self) -> _Table:
        content, mode = _read(self._path)
        if len(content) > LARGEST_FILE:
            raise ConfigError(f"token_file {self._path} is over {LARGEST_FILE} bytes; remove unneeded tokens")
        if mode & stat.S_IROTH:
            _log.warning(
                "token_file %s can be read by every user (mode %o); chmod o-r it", self._path, stat.S_IMODE(mode)
            )
        table = _parse(content, str(self._path))
        if not table:
            _log.warning("token_file %s holds no token: every request that needs a token is rejected", self._path)
        return table


def is_token(text: str) -> bool:
    """Return whether ``text`` can be sent as a bearer token."""
    return _TOKEN.fullmatch(text) is not None


def read_tokens(path: Path) -> list[tuple[str, Scopes]]:
    """Return the tokens of a token file, for a program that sends one. Raises :class:`ConfigError` if invalid."""
    content = _read(path)[0][:LARGEST_FILE]
    table = _parse(content, str(path))
    lines = (line.partition("#")[0].split() for line in content.decode("ascii").splitlines())
    return [(words[0], table[_digest(words[0])]) for words in lines if words]


def _read(path: Path) -> tuple[bytes, int]:
    try:
        return read_regular(path, LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"token_file {path}: cannot be read: {os_error_text(error)}") from None


def _parse(content: bytes, where: str) -> _Table:
    """Return the scopes in a token file by digest. Errors name the line, never its text: it may be a token."""
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"token_file {where} is not ASCII text; write lines of 'token scope[,scope]'") from None
    table: dict[bytes, Scopes] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        digest, scopes = _entry(words, f"token_file {where}, line {number}")
        if digest in table:
            raise ConfigError(f"token_file {where}, line {number}: this token was given before; remove one of the two")
        table[digest] = scopes
    return table


def _entry(words: list[str], where: str) -> tuple[bytes, Scopes]:
    if len(words) != 2:
        raise ConfigError(f"{where}: expected 'token scope[,scope]', found {len(words)} words")
    token, listed = words
    if not is_token(token):
        raise ConfigError(f"{where}: a token may contain only letters, digits and . _ ~ + / - =")
    if len(token) < SHORTEST:
        raise ConfigError(f"{where}: the token has {len(token)} characters; give {SHORTEST} or more")
    scopes = frozenset(scope for scope in SCOPES if scope in listed.split(","))
    if len(scopes) != len(listed.split(",")):
        raise ConfigError(f"{where}: give scopes out of {', '.join(SCOPES)}, each once, separated by commas")
    return _digest(token), scopes


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
