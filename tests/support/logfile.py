"""What a process says on its standard error, in a file: it is there for whoever has seen what came of it."""

from __future__ import annotations

import os
import tempfile


class LogFile:
    """Its :meth:`fileno` is for a process's ``stderr``. What was said can still be read once it is closed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 -- close() does it
        self._said = b""

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def text(self) -> str:
        if not self._file.closed:  # os.pread: the process goes on where its own offset is, which is this file's
            self._said = os.pread(self.fileno(), os.fstat(self.fileno()).st_size, 0)
        return self._said.decode(errors="replace")

    def close(self) -> None:
        self.text  # noqa: B018 -- to be there afterwards
        self._file.close()
