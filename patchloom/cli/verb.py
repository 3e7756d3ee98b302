"""What every verb has: -q, -v, results that stand alone with --json, and a help that shows the usual options first.

An option without a panel (`rich_help_panel`) is one that a newcomer needs: `--help` shows those, `--help-all` shows
every option, panel by panel.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from patchloom.cli import output
from patchloom_runtime.errors import DeviceError, ResourceError, first_line, is_device_failure, is_out_of_memory

OUTPUT = "What is printed"  # panel of the help
_ALL = "patchloom.help_all"

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Print tracebacks of errors, and lists in full length.", rich_help_panel=OUTPUT
    ),
]


def drop_types(params: list[Any]) -> list[Any]:
    """Parameters whose flags name no type in a help."""
    for option in params:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return params


class Verb(TyperCommand):
    """A command whose `--help` leaves out the options that stand in panels."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the options without a panel, or all of them for --help-all."""
        with self._folded(ctx):
            super().format_help(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options; a flag takes no value, so no type of one is shown."""
        return drop_types(super().get_params(ctx))

    @contextmanager
    def _folded(self, ctx: Any) -> Iterator[None]:
        if ctx.meta.get(_ALL):
            yield
            return
        folded: list[Any] = [option for option in self.params if getattr(option, "rich_help_panel", None)]
        for option in folded:
            option.hidden = True
        self.epilog = f"{len(folded)} more options: {ctx.command_path} --help-all"
        try:
            yield
        finally:
            self.epilog = None
            for option in folded:
                option.hidden = False


class Verbs(TyperGroup):
    """The command that all verbs are commands of."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options; a flag takes no value, so no type of one is shown."""
        return drop_types(super().get_params(ctx))


def _show_all(ctx: typer.Context, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, typer.Option("--help-all", help="Show all options.", is_eager=True, callback=_show_all)]


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """The function of a verb with the options that all verbs share."""

    @functools.wraps(function)
    def run(*, quiet: bool, verbose: bool, help_all: bool, **given: Any) -> None:
        del help_all  # which ends the command by itself
        output.be(quiet=quiet, verbose=verbose)
        with output.only_results(as_json=given.get("as_json", False)):
            try:
                function(**given)
            except RuntimeError as error:
                if fault := _device_fault(error, given):
                    raise fault from error
                raise

    shared = {"quiet": Quiet, "verbose": Verbose, "help_all": HelpAll}
    own = inspect.signature(function)
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
             for name, kind in shared.items()]  # fmt: skip
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    run.__annotations__ = function.__annotations__ | shared
    return run


def _device_fault(error: RuntimeError, given: Mapping[str, Any]) -> ResourceError | None:
    """What a device refused, in a line with the options of this verb that help; None for any other error."""
    on_cpu = ", or --device cpu" if "device" in given else ""
    if is_out_of_memory(error):
        batch = f"a --batch smaller than {given['batch']}" if given.get("batch") else "a smaller --batch"
        less = batch if "batch" in given else "fewer or smaller images"
        return ResourceError(f"there is not enough memory ({first_line(error)}). Give {less}{on_cpu}.")
    if is_device_failure(error):
        return DeviceError(
            f"the device failed ({first_line(error)}). Run the same command again{on_cpu}; `nvidia-smi` may say why it "
            "failed."
        )
    return None


def completed(kind: str) -> Callable[[str], list[str]]:
    """What completes the names of a "model", "recipe" or "run"; it is imported when a shell asks."""

    def complete(incomplete: str) -> list[str]:
        from patchloom.cli import completion

        found: list[str] = getattr(completion, f"complete_{kind}")(incomplete)
        return found

    return complete
