"""Spellings of earlier releases: each still works, and those that will go print a hint on stderr."""

from collections.abc import Sequence

# Values of options that may stand alone, which typer does not know.
VALUES_ALONE = {"--knn": "20", "--linear-sgd": "100"}

# (verb, old option) → new option. The verb '' stands for all verbs.
RENAMED = {
    ("report", "--out"): "--page",
    ("look", "--out"): "--page",
    ("bench", "--batch"): "--batches",
    ("", "--neighbours"): "--neighbors",
}
RENAMED_WITH_HINT = {
    ("serve", "--workers"): "--processes",
    **{(verb, "--without"): "--exclude" for verb in ("train", "check", "evaluate", "compare", "report", "sweep")},
}

# Options that moved from `evaluate` to a verb of their own.
MOVED = {
    "probe": ("--knn", "--linear", "--linear-sgd", "--few-shot", "--levels"),
    "compare": ("--agreement", "--seeds"),
}


def modernize(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return arguments in today's spelling, and a hint per spelling that will go."""
    verb = verb_of(arguments)
    hints: list[str] = []
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, rest = list(arguments[:end]), list(arguments[end:])
    if verb == "evaluate":
        verb = _move(options, hints)
    for place, argument in enumerate(options):
        name, equals, value = argument.partition("=")
        new = RENAMED.get((verb, name)) or RENAMED.get(("", name))
        if moved := RENAMED_WITH_HINT.get((verb, name)):
            hints.append(hint(f"{verb} {name}", f"{verb} {moved}"))
        if new := new or moved:
            options[place] = f"{new}{equals}{value}"
    return _with_values(options) + rest, hints


def verb_of(arguments: Sequence[str]) -> str:
    """Return the verb of a command line: its first word that is not an option."""
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def hint(old: str, new: str) -> str:
    """Return the line that tells a user about a new spelling."""
    return f"note: `patchloom {old}` is now `patchloom {new}`"


def _move(options: list[str], hints: list[str]) -> str:
    """Replace `evaluate` in `options` by the verb that has these options now, and return that verb."""
    names = [option.partition("=")[0] for option in options]
    for verb, moved in MOVED.items():
        if name := next((name for name in names if name in moved), None):
            options[options.index("evaluate")] = verb
            hints.append(hint(f"evaluate {name}", f"{verb} {name}"))
            return verb
    return "evaluate"


def _with_values(options: list[str]) -> list[str]:
    complete: list[str] = []
    for option, following in zip(options, [*options[1:], "--"], strict=False):
        alone = option in VALUES_ALONE and following.startswith("-")
        complete += [option, VALUES_ALONE[option]] if alone else [option]
    return complete
