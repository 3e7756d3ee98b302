"""What a person sees on a terminal of 80 columns, as the terminal gets it."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

from tests.reliability.commands import OPTIONS, class_folders, forked


def terminal_output(*arguments: object) -> str:
    """What a command writes to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = forked(*arguments, env={"TERM": "xterm"}, terminal=theirs)
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    text = b"".join(parts).decode()
    assert process.wait(60) == 0, text
    return text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pseudo-terminals end differently elsewhere")
def test_bars_are_drawn_and_not_spelled_out(tmp_path) -> None:
    data = class_folders(tmp_path / "data")
    text = terminal_output("train", data, "--out", tmp_path / "run", *OPTIONS)
    text += terminal_output("evaluate", tmp_path / "run", data) + terminal_output("check", data)
    assert "\\u001b" not in text
    assert "\\x1b" not in text
    assert "\x1b[" in text  # bars are drawn by these
    assert f"patchloom predict {tmp_path / 'run'}" in re.sub(r"\s+", " ", text)  # it came to its end
