"""Messages between the front process and the model processes: a JSON header, then parts of bytes.

Nothing is pickled: neither side can make the other execute anything.
"""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

HEARTBEAT_SECONDS = 0.5  # between the messages by which a model process shows that it is running

_LENGTH = struct.Struct(">I")


def pack(header: dict[str, Any], parts: Sequence[bytes] = ()) -> list[bytes]:
    """Return the buffers of one message, in order."""
    text = json.dumps(header | {"sizes": [len(part) for part in parts]}).encode()
    return [_LENGTH.pack(len(text)), text, *parts]


async def read_message(reader: asyncio.StreamReader) -> tuple[dict[str, Any], list[bytes]]:
    """Return header and parts; raise IncompleteReadError if the other side has gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    header = json.loads(await reader.readexactly(length))
    return header, [await reader.readexactly(size) for size in header["sizes"]]


class Connection:
    """Blocking messages for a model process; several threads may write."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._file = self._socket.makefile("rb")
        self._writing = threading.Lock()

    def write(self, header: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        with self._writing:
            self._socket.sendall(b"".join(pack(header, parts)))

    def read(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """Return header and parts, or None if the other side has gone."""
        length = self._exactly(_LENGTH.size)
        if length is None:
            return None
        text = self._exactly(*_LENGTH.unpack(length))
        if text is None:
            return None
        header = json.loads(text)
        parts = [self._exactly(size) for size in header["sizes"]]
        return None if None in parts else (header, [part for part in parts if part is not None])

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _exactly(self, size: int) -> bytes | None:
        data = self._file.read(size)
        return data if len(data) == size else None
