"""Options that every verb has (-q, -v, --help-all), and a help that shows the usual options first.

An option without a panel is one that a newcomer needs: `--help` shows those, `--help-all` shows every option.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from patchloom.cli import output
from patchloom.cli.options import read_settings, settings_of, settings_parameters
from patchloom.options import MODEL, OUTPUT
from patchloom.plugins import load_plugin
from patchloom_runtime.errors import (
    DeviceError,
    ResourceError,
    UsageError,
    first_line,
    is_device_failure,
    is_out_of_memory,
    nearest,
)

_ALL = "patchloom.help_all"

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Print tracebacks of errors, and lists in full.", rich_help_panel=OUTPUT),
]


class Verb(TyperCommand):
    """A command whose `--help` omits the options that have a panel."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._folded(ctx):
            super().format_help(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        return drop_needless_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    @contextmanager
    def _folded(self, ctx: Any) -> Iterator[None]:
        folded: list[Any] = [option for option in self.params if getattr(option, "rich_help_panel", None)]
        if ctx.meta.get(_ALL) or not folded:
            yield
            return
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
    """The `patchloom` command, which holds the verbs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return drop_needless_types(super().get_params(ctx))


def drop_needless_types(params: list[Any]) -> list[Any]:
    """Return parameters whose flags and arguments show no type in the help."""
    for option in params:
        if getattr(option, "is_flag", False):
            option.metavar = ""
        elif isinstance(option, TyperArgument):
            option.display_type_rich = lambda **_: None  # type: ignore[method-assign]
    return params


def _print_all_help(ctx: typer.Context, is_set: bool) -> None:
    if is_set and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, typer.Option("--help-all", help="Show all options.", is_eager=True, callback=_print_all_help)]


Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", help="Run a Python file of yours that registers parts. Repeatable.", metavar="FILE",
        rich_help_panel=MODEL,
    ),
]  # fmt: skip
SHARED = {"plugin": Plugins, "quiet": Quiet, "verbose": Verbose, "help_all": HelpAll}


def verb(function: Callable[[Any], None]) -> Callable[..., None]:
    """Return the typer command of a verb: the options of its settings, and those that all verbs share."""
    settings = settings_of(function)

    @functools.wraps(function)
    def run(*, plugin: list[str] | None, quiet: bool, verbose: bool, help_all: bool, **values: Any) -> None:
        del help_all  # its callback ends the command
        output.configure(quiet=quiet, verbose=verbose)
        with output.only_results(as_json=values.get("as_json", False)):
            for file in plugin or ():
                load_plugin(file)
            try:
                function(read_settings(settings, values))
            except RuntimeError as error:
                if fault := _device_fault(error, values):
                    raise fault from error
                raise

    parameters = [
        *settings_parameters(settings),
        *(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None if name == "plugin" else False, annotation=kind
            )
            for name, kind in SHARED.items()
        ),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def listed(function: Callable[[Any], None]) -> Callable[[], None]:
    """Return a command with the name and docstring of a verb, for the list of commands: reading options takes time."""

    def run() -> None: ...

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


def _device_fault(error: RuntimeError, values: dict[str, Any]) -> ResourceError | None:
    """Return the error for a device that ran out of memory or failed, with the options that help; otherwise None."""
    on_cpu = ", or --device cpu" if "device" in values else ""
    if is_out_of_memory(error):
        batch = f"a --batch smaller than {values['batch']}" if values.get("batch") else "a smaller --batch"
        less = batch if "batch" in values else "fewer or smaller images"
        return ResourceError(f"there is not enough memory ({first_line(error)}). Pass {less}{on_cpu}.")
    if is_device_failure(error):
        return DeviceError(
            f"the device failed ({first_line(error)}). Run the same command again{on_cpu}; `nvidia-smi` may say why it "
            "failed."
        )
    return None


def print_help(ctx: typer.Context, name: str | None) -> None:
    """Print the help of one command, or the list of all commands."""
    above = ctx.parent
    assert above is not None  # `help` is a verb of the command line
    if name is None:
        typer.echo(above.get_help())
        return
    known = above.command.list_commands(above)  # type: ignore[attr-defined]
    if name not in known:
        raise UsageError(f"no command is called {name!r}.{nearest(name, known)} `patchloom help` lists all of them")
    command = above.command.get_command(above, name)  # type: ignore[attr-defined]
    with typer.Context(command, info_name=name, parent=above) as context:
        typer.echo(context.get_help())
