"""The command line: one verb a file, each importing what it needs only when it runs."""

import sys

import typer

from patchloom.cli import bench, check, demo, evaluate, models, predict, recipes, train
from patchloom.errors import PatchloomError

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
app.command("recipes")(recipes.recipes)
app.command("models")(models.models)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)


def main() -> None:
    """Run the command line; what goes wrong is one line on stderr and an exit code (errors.py)."""
    try:
        code = app(standalone_mode=False)
    except PatchloomError as error:
        sys.exit(_complain(str(error), error.exit_code))
    except KeyboardInterrupt:
        sys.exit(_complain("stopped", 130))
    except Exception as error:
        # typer's own usage errors: an unknown option, a missing argument
        if not hasattr(error, "format_message"):
            raise
        sys.exit(_complain(error.format_message().replace("\n", " "), 2))
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code
