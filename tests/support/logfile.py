"""A file for the standard error of a process. A test can read text as soon as the process has written it."""

import os
import tempfile


class LogFile:
    """Pass :meth:`fileno` as a process's ``stderr``. The text can still be read after :meth:`close`."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 -- close() does it
        self._content = b""

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def text(self) -> str:
        if not self._file.closed:  # os.pread keeps the offset, which the process shares
            self._content = os.pread(self.fileno(), os.fstat(self.fileno()).st_size, 0)
        return self._content.decode(errors="replace")

    def close(self) -> None:
        self.text  # noqa: B018 -- to be there afterwards
        self._file.close()
