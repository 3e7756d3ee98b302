"""The command that stands for a reader, as a user would type it."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from patchloom import cli
from patchloom_runtime.errors import PatchloomError, ResourceError


def run_command(arguments: tuple[Any, ...]) -> None:
    """A command inside this process; its error comes back as a PatchloomError, anything else as what it is."""
    out, errors = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["patchloom", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            cli.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    said = errors.getvalue()
    if code not in (0, 2, 3, 4, 5, 6) or "Traceback" in said:
        raise AssertionError(f"exit code {code}: {said[-300:]}") from None
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    if code in (2, 4, 5, 6) and arguments[0] != "verify" and (len(lines) != 1 or said.splitlines()[-1] != lines[0]):
        raise AssertionError(f"exit code {code} with {len(lines)} lines of error: {said[-300:]!r}")
    if code:
        raise (ResourceError if code == ResourceError.exit_code else PatchloomError)(said)
