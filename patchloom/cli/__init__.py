"""The command line: one verb a file, each importing what it needs only when it runs."""

import signal
import sys
from contextlib import suppress

import typer

from patchloom.cli import (
    bench,
    check,
    demo,
    evaluate,
    index,
    look,
    models,
    predict,
    recipes,
    report,
    search,
    train,
    translate,
    verify,
)
from patchloom.cli.stopping import ToldToStop, told_to_stop
from patchloom.cli.streams import Failures, watched
from patchloom.errors import PatchloomError, ResourceError
from patchloom.printable import printable

LOST = ResourceError.exit_code
STOPPED = 128  # exit codes above it: by a signal, which is no error

app = typer.Typer(
    name="patchloom",
    help="Patch-based networks and the training that makes them work.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("check")(check.check)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("translate")(translate.translate)
app.command("look")(look.look)
app.command("index")(index.index)
app.command("search")(search.search)
app.command("report")(report.report)
app.command("verify")(verify.verify)
app.command("recipes")(recipes.recipes)
app.command("models")(models.models)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)


def main() -> None:
    """Run the command line; what goes wrong is one line on stderr and an exit code (errors.py)."""
    with watched() as output:
        code = _run(output)
        if code > STOPPED:
            # A second Ctrl-C while Python ends would show a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    if output.first and not output.nobody_reads and code != LOST:
        code = _lost(output.first)
    sys.exit(code)


def _with_number(arguments: list[str]) -> list[str]:
    """`--knn` alone asks for 20 neighbours; typer knows no option whose value may be left out."""
    following = [*arguments[1:], "--"]
    pairs = zip(arguments, following, strict=False)  # of nothing there is nothing
    return [part for given, after in pairs for part in ((given, "20") if _is_bare_knn(given, after) else (given,))]


def _is_bare_knn(argument: str, after: str) -> bool:
    return argument == "--knn" and after.startswith("-")


def _run(output: Failures) -> int:
    try:
        with told_to_stop():
            code = app(_with_number(sys.argv[1:]), standalone_mode=False)
    except (PatchloomError, ToldToStop) as error:
        return _complain(str(error), error.exit_code)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE  # as any command in a pipe whose reader left
    except (Exception, SystemExit) as error:
        if output.first:
            # typer ends by itself, with 1, where nobody reads any more.
            return 128 + signal.SIGPIPE if output.nobody_reads else _lost(output.first)
        # typer's own usage errors: an unknown option, a missing argument
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message().replace("\n", " "), 2)
    return code if isinstance(code, int) else 0


def _lost(error: OSError) -> int:
    return _complain(f"what was to be printed is lost: standard output cannot be written ({error.strerror})", LOST)


def _complain(message: str, exit_code: int) -> int:
    with suppress(OSError):  # a terminal that was closed
        shown = printable(message)
        print(shown if exit_code > STOPPED else f"error: {shown}", file=sys.stderr, flush=True)
    return exit_code
