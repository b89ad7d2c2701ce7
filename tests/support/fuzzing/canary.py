"""Files that a conversion must not open. inotify also sees accesses by native libraries, audit hooks do not."""

import ctypes
import os
import struct
from pathlib import Path

from safetensors.numpy import save_file

from fuzzing.seed import mlp_weights

_IN_ACCESS, _IN_MODIFY, _IN_OPEN, _IN_CREATE, _IN_DELETE, _IN_MOVE = 0x1, 0x2, 0x20, 0x100, 0x200, 0xC0
_EVENT = struct.Struct("iIII")


class Canary:
    """Write ``secret`` and ``secret.safetensors`` to ``parent`` and watch it. Conversions run in subdirectories."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / "secret"
        self.path.write_bytes(bytes(1 << 20))
        save_file(mlp_weights(), parent / "secret.safetensors")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = _IN_ACCESS | _IN_MODIFY | _IN_OPEN | _IN_CREATE | _IN_DELETE | _IN_MOVE
        if self._libc.inotify_add_watch(self._descriptor, os.fsencode(parent), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def disturbed(self, expected: str) -> list[str]:
        """Return the events in ``parent`` since the last call, except those of the directory ``expected``."""
        found: list[str] = []
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return found
            while data:
                _, mask, _, size = _EVENT.unpack_from(data)
                name = data[_EVENT.size : _EVENT.size + size].rstrip(b"\0").decode()
                data = data[_EVENT.size + size :]
                if name and name != expected:
                    found.append(f"canary {name}: event {mask:#x}")

    def close(self) -> None:
        os.close(self._descriptor)
