"""What goes between the two kinds of processes: a JSON header that says how long each of the parts is, and the parts.

No pickles: neither side can make the other run anything.
"""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

HEARTBEAT_SECONDS = 0.5  # between the messages by which a model process says that it runs

_LENGTH = struct.Struct(">I")


def packed(header: dict[str, Any], parts: Sequence[bytes] = ()) -> list[bytes]:
    """What to write, in order."""
    text = json.dumps(header | {"sizes": [len(part) for part in parts]}).encode()
    return [_LENGTH.pack(len(text)), text, *parts]


async def read_message(reader: asyncio.StreamReader) -> tuple[dict[str, Any], list[bytes]]:
    """Header and parts; an IncompleteReadError where the other side has gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    header = json.loads(await reader.readexactly(length))
    return header, [await reader.readexactly(size) for size in header["sizes"]]


class Connection:
    """The same for a process that has nothing else to do meanwhile; several threads may write."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")
        self._writing = threading.Lock()

    def write(self, header: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        """Send a message whole."""
        with self._writing:
            self._socket.sendall(b"".join(packed(header, parts)))

    def read(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """Header and parts; None where the other side has gone."""
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
        """Say that nothing follows."""
        self._file.close()
        self._socket.close()

    def _exactly(self, size: int) -> bytes | None:
        data = self._file.read(size)
        return data if len(data) == size else None
