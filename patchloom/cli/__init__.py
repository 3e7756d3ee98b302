"""The command line: one verb per file. Each verb imports what it needs when it runs."""

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
from patchloom.cli.old_spellings import modernize, verb_of
from patchloom.cli.streams import PIPE_CLOSED, StopRequested, WriteFailures, exit_on_signals, watched_streams
from patchloom.cli.verb import Verb, Verbs, listed, print_help, verb
from patchloom_runtime.errors import DeviceError, PatchloomError, ResourceError, UsageError, shortened
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import ADVICE, SCARCE

OUTPUT_LOST = ResourceError.exit_code
STOPPED = 128  # exit codes above it: ended by a signal, which is not an error
_NO_MEMORY = ("failed to map segment", "annot allocate memory")  # messages of the dynamic linker
TORCH_ADDRESS_SPACE = "about 3 GiB of address space"  # VmSize after importing torch 2.15 for CUDA 13.2 was 3,080 MiB

TRAIN, USE, MEASURE, LOOK_UP = "Train", "Use a trained model", "Measure and show", "Look up"  # panels of the help
# Each verb is the function of its name in the module of its name.
VERBS = {
    TRAIN: ("check", "pack", "train", "watch", "calibrate", "sweep", "audit"),
    USE: ("predict", "translate", "index", "search", "export", "app", "serve", "convert"),
    MEASURE: ("evaluate", "compare", "probe", "report", "look", "bench", "prune", "soup"),
    LOOK_UP: ("verify", "sign", "models", "recipes"),
}
LISTINGS = (("--help",), ("-h",), ("help",))  # command lines that print the list of commands
COMPLETION = "_PATCHLOOM_COMPLETE"  # set by a shell that completes a command line, which typer then reads
OLD_VERBS = ("demo", "prepare")  # they still work, with a hint, and are not listed


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line.

    If `arguments` name a verb, only that verb is imported. For a list of commands no options are read.
    """
    app = typer.Typer(
        cls=Verbs,
        name="patchloom",
        help="Patch-based networks and the training that makes them work.",
        epilog="Start: patchloom train FOLDER (one folder of images per class in it). Options: patchloom help COMMAND",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    chosen = verb_of(arguments)
    make_command = listed if tuple(arguments) in LISTINGS else verb
    panels = {name: panel for panel, names in VERBS.items() for name in names} | dict.fromkeys(OLD_VERBS)
    for name in [chosen] if chosen in panels else panels:
        function = getattr(import_module(f"patchloom.cli.{name}"), name)
        app.command(name, cls=Verb, rich_help_panel=panels[name], hidden=name in OLD_VERBS)(make_command(function))
    app.command("help", cls=Verb, rich_help_panel=LOOK_UP)(help_on)
    app.callback()(patchloom)
    return app


def help_on(
    ctx: typer.Context,
    verb: Annotated[str | None, typer.Argument(help="Command. Default: all commands.", metavar="COMMAND")] = None,
) -> None:
    """Show the commands, or the options of one command."""
    print_help(ctx, verb)


def _print_version(is_set: bool) -> None:
    if is_set:
        from patchloom import __version__

        print(f"patchloom {__version__}")
        raise typer.Exit


def patchloom(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print tracebacks of errors, and lists in full.")
    ] = False,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Patch-based networks and the training that makes them work."""
    output.configure(quiet=quiet, verbose=verbose)


def main() -> None:
    """Run the command line. An error is one line on stderr and an exit code (see patchloom_runtime.errors)."""
    # Read when torch is imported: waiting threads spin briefly, then sleep, so that several runs can share the cores.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    with watched_streams() as stdout:
        code = _run(stdout)
        if code > STOPPED:
            # A second Ctrl-C while Python exits would print a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    if stdout.first and not stdout.closed and code != OUTPUT_LOST:
        code = _output_lost(stdout.first)
    sys.exit(code)


def _run(stdout: WriteFailures) -> int:
    output.reset()
    if any("\0" in argument for argument in sys.argv):
        return _complain("an argument has a NUL character in it, which no path or option can have", 2)
    arguments, hints = modernize(sys.argv[1:])
    if not arguments and COMPLETION not in os.environ:
        arguments = ["--help"]
    for line in hints:
        print(line, file=sys.stderr)
    try:
        with exit_on_signals():
            code = make_app(arguments)(arguments, prog_name="patchloom", standalone_mode=False)
    except (PatchloomError, StopRequested) as error:
        _print_traceback()
        code = _complain(str(error), error.exit_code)
        if isinstance(error, DeviceError) and sys.modules["torch"].cuda.is_initialized():
            sys.stdout.flush()
            os._exit(code)  # freeing tensors of a failed GPU would abort the process
        return code
    except BrokenPipeError:
        return PIPE_CLOSED  # as any command in a pipe whose reader left
    except ImportError as error:
        if not any(words in str(error) for words in _NO_MEMORY):
            raise
        _print_traceback()
        return _complain(
            f"there is not enough memory to load a library ({error}). PyTorch takes {TORCH_ADDRESS_SPACE}: allow "
            "more with ulimit -v, or free some.",
            ResourceError.exit_code,
        )
    except (OSError, MemoryError) as error:
        if stdout.first:
            return _output_lost(stdout.first)
        _print_traceback()
        return _complain(*system_error(error))
    except (Exception, SystemExit) as error:
        if stdout.first:
            # typer itself exits with 1 when the pipe was closed.
            return stdout.closed or _output_lost(stdout.first)
        # typer's own usage errors: an unknown option, a missing argument
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message().replace("\n", " "), 2)
    return code if isinstance(code, int) else 0


def system_error(error: OSError | MemoryError) -> tuple[str, int]:
    """Return a message and an exit code for an error of the operating system that no verb handled."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for this", ResourceError.exit_code
    name = f"{error.filename}: " if error.filename else ""
    if error.errno in SCARCE:
        return f"{name}{error.strerror}. {ADVICE}", ResourceError.exit_code
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{name}{error.strerror or error}", ResourceError.exit_code if is_full else UsageError.exit_code


def _print_traceback() -> None:
    if output.is_verbose():
        traceback.print_exc()


def _output_lost(error: OSError) -> int:
    return _complain(f"the output is lost: standard output cannot be written ({error.strerror})", OUTPUT_LOST)


def _complain(message: str, exit_code: int) -> int:
    with suppress(OSError):  # a terminal that was closed
        line = printable(shortened(message))
        print(line if exit_code > STOPPED else f"error: {line}", file=sys.stderr, flush=True)
    return exit_code
