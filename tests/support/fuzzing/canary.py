"""Files that nothing may open: native libraries are caught at them, too, which Python's audit hooks do not see."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from safetensors.numpy import save_file

from fuzzing.seed import mlp_weights

_IN_ACCESS, _IN_MODIFY, _IN_OPEN, _IN_CREATE, _IN_DELETE, _IN_MOVE = 0x1, 0x2, 0x20, 0x100, 0x200, 0xC0
_EVENT = struct.Struct("iIII")


class Canary:
    """``secret`` and ``secret.safetensors`` in ``parent``, watched; mutants are converted in directories below."""

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
        """What happened beside the directory ``expected`` since the last question."""
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
