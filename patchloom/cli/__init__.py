"""The command line: one verb per file, each importing what it needs only when it runs."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import typer

from patchloom.cli import output
from patchloom.cli.stopping import StopRequested, exit_on_signals
from patchloom.cli.streams import Failures, watched
from patchloom.cli.verb import Verb, Verbs, print_help, verb
from patchloom_runtime.errors import PatchloomError, ResourceError, UsageError, shortened
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import ADVICE, SCARCE

LOST = ResourceError.exit_code
_USUAL = {"--knn": "20", "--linear-sgd": "100"}  # values of options that may be given alone
_NO_ROOM = ("failed to map segment", "annot allocate memory")  # of the dynamic linker
TORCH_ADDRESS_SPACE = "about 3 GiB of address space"  # VmSize after importing torch 2.15 for CUDA 13.2 was 3,080 MiB
STOPPED = 128  # exit codes above it: by a signal, which is no error

TRAIN, USE, MEASURE, KNOW = "Train", "Use what was trained", "Measure and show", "Look up"  # panels of the help
# Each verb is the function of its name in the module of its name.
VERBS = {
    TRAIN: ("check", "prepare", "train", "sweep", "demo"),
    USE: ("predict", "translate", "index", "search", "export", "app", "serve", "convert"),
    MEASURE: ("evaluate", "report", "look", "bench", "prune"),
    KNOW: ("verify", "models", "recipes"),
}


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The command line; of one that is given its verb, that verb alone is imported."""
    app = typer.Typer(
        cls=Verbs,
        name="patchloom",
        help="Patch-based networks and the training that makes them work.",
        epilog="Options of a command: patchloom help COMMAND",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    asked = next((argument for argument in arguments if not argument.startswith("-")), "")
    every = [(name, panel) for panel, names in VERBS.items() for name in names]
    for name, panel in [each for each in every if each[0] == asked] or every:
        function = getattr(import_module(f"patchloom.cli.{name}"), name)
        app.command(name, cls=Verb, rich_help_panel=panel)(verb(function))
    app.command("help", rich_help_panel=KNOW)(help_on)
    app.callback()(patchloom)
    return app


def help_on(
    ctx: typer.Context, verb: Annotated[str | None, typer.Argument(help="Which command; all when left out.")] = None
) -> None:
    """Show what the commands are, or the options of one."""
    print_help(ctx, verb)


def _print_version(asked: bool) -> None:
    if asked:
        from patchloom import __version__

        print(f"patchloom {__version__}")
        raise typer.Exit


def patchloom(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print tracebacks of errors, and lists in full length.")
    ] = False,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Patch-based networks and the training that makes them work."""
    output.configure(quiet=quiet, verbose=verbose)


def main() -> None:
    """Run the command line; what goes wrong is one line on stderr and an exit code (errors.py)."""
    # Read when torch is imported: threads that wait spin shortly, then sleep, so that several runs share their cores.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    with watched() as stdout:
        code = _run(stdout)
        if code > STOPPED:
            # A second Ctrl-C while Python ends would show a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    if stdout.first and not stdout.nobody_reads and code != LOST:
        code = _lost(stdout.first)
    sys.exit(code)


def _with_number(arguments: list[str]) -> list[str]:
    """`--knn` alone asks for 20 neighbours, `--linear-sgd` for 100 epochs: typer has no values that may be left out."""
    following = [*arguments[1:], "--"]
    found: list[str] = []
    for given, after in zip(arguments, following, strict=False):  # of nothing there is nothing
        found += [given, _USUAL[given]] if given in _USUAL and after.startswith("-") else [given]
    return found


def _run(stdout: Failures) -> int:
    output.reset()
    if any("\0" in argument for argument in sys.argv):
        return _complain("an argument has a NUL character in it, which no path or option can have", 2)
    try:
        with exit_on_signals():
            code = make_app(sys.argv[1:])(_with_number(sys.argv[1:]), prog_name="patchloom", standalone_mode=False)
    except (PatchloomError, StopRequested) as error:
        if output.is_verbose():
            traceback.print_exc()
        return _complain(str(error), error.exit_code)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE  # as any command in a pipe whose reader left
    except ImportError as error:
        if not any(words in str(error) for words in _NO_ROOM):
            raise
        if output.is_verbose():
            traceback.print_exc()
        return _complain(
            f"there is not enough memory to load a library ({error}). PyTorch takes {TORCH_ADDRESS_SPACE}: allow "
            "more with ulimit -v, or free some.",
            ResourceError.exit_code,
        )
    except (OSError, MemoryError) as error:
        if stdout.first:
            return _lost(stdout.first)
        if output.is_verbose():
            traceback.print_exc()
        return _complain(*refused_by_system(error))
    except (Exception, SystemExit) as error:
        if stdout.first:
            # typer ends by itself, with 1, where nobody reads any more.
            return 128 + stdout.nobody_reads if stdout.nobody_reads else _lost(stdout.first)
        # typer's own usage errors: an unknown option, a missing argument
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message().replace("\n", " "), 2)
    return code if isinstance(code, int) else 0


def refused_by_system(error: OSError | MemoryError) -> tuple[str, int]:
    """What the system refuses where nobody foresaw it, in a line, and the exit code."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for this", ResourceError.exit_code
    name = f"{error.filename}: " if error.filename else ""
    if error.errno in SCARCE:
        return f"{name}{error.strerror}. {ADVICE}", ResourceError.exit_code
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{name}{error.strerror or error}", ResourceError.exit_code if is_full else UsageError.exit_code


def _lost(error: OSError) -> int:
    return _complain(f"what was to be printed is lost: standard output cannot be written ({error.strerror})", LOST)


def _complain(message: str, exit_code: int) -> int:
    with suppress(OSError):  # a terminal that was closed
        shown = printable(shortened(message))
        print(shown if exit_code > STOPPED else f"error: {shown}", file=sys.stderr, flush=True)
    return exit_code
