"""`patchloom help [VERB]`: the same as --help."""

import typer

from patchloom_runtime.errors import UsageError, nearest


def show_help(ctx: typer.Context, verb: str | None) -> None:
    """Show what the commands are, or the options of one."""
    above = ctx.parent
    assert above is not None  # it is a verb of the command line
    if verb is None:
        typer.echo(above.get_help())
        return
    known = above.command.list_commands(above)  # type: ignore[attr-defined]
    if verb not in known:
        raise UsageError(f"no command is called {verb!r}.{nearest(verb, known)} `patchloom help` lists all of them")
    command = above.command.get_command(above, verb)  # type: ignore[attr-defined]
    with typer.Context(command, info_name=verb, parent=above) as of_verb:
        typer.echo(of_verb.get_help())
