"""Pages of the reference, as Markdown made from the code: commands, Python, recipe fields, files, metrics, errors.

python tools/reference.py OUT     # write the pages into a folder; `make docs` makes them while the site is built
"""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

import typer  # noqa: E402

import patchloom  # noqa: E402
from patchloom import cli, errors  # noqa: E402
from patchloom.cli.verb import SHARED  # noqa: E402
from patchloom.evaluation import detection, segmentation  # noqa: E402
from patchloom.recipes import parts, schema  # noqa: E402


def cell(text: object) -> str:
    """Return a text as one cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: object) -> str:
    """Return a text as code in a cell."""
    return f"`{cell(text)}`".replace("&lt;", "<") if str(text) else ""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ("---",) * len(head), *rows]) + "\n"


_ENTRY = re.compile(r"(?m)^( *)(\S+) {2,}(\S.*(?:\n\1 {4,}\S.*)*)")  # name  meaning, in aligned columns


def docstring(thing: object) -> str:
    """Return a docstring as Markdown: lists of names and meanings become tables, other columns stay as they are."""
    paragraphs = re.split(r"\n{2,}", inspect.getdoc(thing) or "")
    return "\n\n".join(map(_paragraph, paragraphs)) + "\n"


def _paragraph(text: str) -> str:
    if text.startswith("Args:\n"):
        text = re.sub(r"(?m)^( {4}\w+): ", r"\1  ", text.removeprefix("Args:\n"))
    rows = [(code(name), cell(meaning)) for _, name, meaning in _ENTRY.findall(text)]
    head = _ENTRY.sub("", text).strip()
    if rows and "\n" not in head:
        return (f"**{head}**\n\n" if head else "") + table(("name", "meaning"), rows).rstrip()
    return f"```text\n{text}\n```" if re.search(r"(?m)^ |^\S+ {2,}\S", text) else text


_TYPES = {int: "INTEGER", float: "FLOAT"}


# Commands -------------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Return every command with all of its options, as `--help-all` has them."""
    group: Any = typer.main.get_command(cli.make_app())
    page = [
        "# Commands",
        "",
        "Every command with all of its options, from the same text as `--help-all`. `patchloom help COMMAND` "
        "prints the usual ones only.",
        "",
        "These options belong to every command:",
        "",
        table(("option", "meaning"), [_option_row(p)[:2] for p in group.commands["train"].params if p.name in SHARED]),
    ]
    for panel, names in cli.VERBS.items():
        page += [f"## {panel}", ""]
        for name in names:
            page += _command(name, group.commands[name])
    return "\n".join(page)


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"### {name} {{#{name}}}\n"
    yield f"`patchloom {name} {pieces}`\n"
    text = inspect.cleandoc(command.help or "").replace("<", "&lt;")
    yield re.sub(r"(?m)^(patchloom .+)$", r"`\1`", text) + "\n"  # examples
    own = [param for param in command.params if param.name not in SHARED and not getattr(param, "hidden", False)]
    panels = dict.fromkeys(getattr(param, "rich_help_panel", None) for param in own)
    rows: list[tuple[str, ...]] = []
    for panel in sorted(panels, key=lambda panel: panel is not None):
        if panel:
            rows.append((f"**{panel}**", "", ""))
        rows += [_option_row(param) for param in own if getattr(param, "rich_help_panel", None) == panel]
    yield table(("option", "meaning", "default"), rows)


def _option_row(param: Any) -> tuple[str, str, str]:
    if param.param_type_name == "argument":
        return code(param.metavar or (param.name or "").upper()), cell(getattr(param, "help", "") or ""), ""
    flag = getattr(param, "is_flag", False)
    names = ", ".join([*param.opts, *param.secondary_opts])
    metavar = "" if flag else (param.metavar or _TYPES.get(param.type_descriptor.annotation, "TEXT"))
    default = param.default
    plain = not callable(default) and type(default) in (str, int, float) and default != ""
    return code(f"{names} {metavar}".strip()), cell(param.help or ""), code(default) if plain else ""


# Python ---------------------------------------------------------------------------------------------------------------


def python() -> str:
    """Return every public function and class of `import patchloom` with its docstring."""
    named = {name: getattr(patchloom, name) for name in patchloom.__all__}
    for name, place in patchloom._CALLED.items():
        module, _, attribute = place.partition(":")
        named[name] = getattr(importlib.import_module(module), attribute)
    functions = {name: thing for name, thing in named.items() if not inspect.isclass(thing)}
    classes = {name: thing for name, thing in named.items() if inspect.isclass(thing)}
    page = [
        "# Python",
        "",
        "Every public name of `import patchloom`, from its docstring. [Python API](../python.md) shows them in use.",
        "",
        "## Functions",
        "",
    ]
    for name, thing in sorted(functions.items()):
        page += [f"### {name} {{#{name}}}", "", _signature(name, thing), docstring(thing)]
    page += ["## Classes", ""]
    for name, thing in sorted(classes.items()):
        if issubclass(thing, BaseException):
            continue
        page += [f"### {name} {{#{name}}}", "", _signature(name, thing), docstring(thing)]
        members = {
            key: value for key, value in vars(thing).items() if not key.startswith("_") and inspect.getdoc(value)
        }
        rows = [
            (code(key + _parameters(value)), cell(inspect.getdoc(value) or ""))
            for key, value in members.items()
            if isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
        ]
        if rows:
            page.append(table(("member", "meaning"), rows))
    page += ["## Errors", "", "[Errors](errors.md) lists the exceptions.", ""]
    return "\n".join(page)


def _signature(name: str, thing: Any) -> str:
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return f"```text\npatchloom.{name}\n```\n"
    words: list[str] = []
    star = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        default = "" if parameter.default is parameter.empty else f"={_shown(parameter.default)}"
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        words.append(f"{prefix}{parameter.name}{default}")
    line = f"patchloom.{name}({', '.join(words)})"
    if len(line) > 100:
        line = f"patchloom.{name}(\n    " + ", ".join(words) + "\n)"
        line = re.sub(r"(.{60,95}?,) ", r"\1\n    ", line)
    return f"```text\n{line}\n```\n"


def _shown(default: object) -> str:
    text = repr(default)
    return "…" if text.startswith("<") or " at 0x" in text or len(text) > 40 else text


def _parameters(member: Any) -> str:
    if isinstance(member, property):
        return ""
    function = getattr(member, "__func__", member)
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return f"({', '.join(names)})"


# Recipe fields --------------------------------------------------------------------------------------------------------


def recipe_fields() -> str:
    """Return every field of a recipe: type, default and the comment of its line."""
    page = [
        "# Recipe fields",
        "",
        "`--set KEY=VALUE`, `set={…}` in Python and the `recipe.yaml` of a run use these keys. `patchloom recipes "
        "NAME` prints the values of a published recipe.",
        "",
        "## Fields of the recipe itself",
        "",
        _fields(schema.Recipe, ""),
    ]
    for name, group in parts.GROUPS.items():
        page += [f"## {name}", "", docstring(group), _fields(group, f"{name}.")]
    return "\n".join(page)


def _fields(group: type, prefix: str) -> str:
    comments, types = _comments_and_types(group)
    rows = []
    for field in dataclasses.fields(group):
        if field.name in parts.GROUPS and not prefix:
            continue
        default = "" if field.default is dataclasses.MISSING else str(field.default)
        if isinstance(field.default, tuple):
            default = ",".join(map(str, field.default))
        rows.append((code(prefix + field.name), code(types[field.name]), code(default), cell(comments[field.name])))
    return table(("field", "type", "default", "meaning"), rows)


def _comments_and_types(group: type) -> tuple[dict[str, str], dict[str, str]]:
    lines = inspect.getsource(group).splitlines()
    tree: Any = ast.parse(inspect.cleandoc(inspect.getsource(group))).body[0]
    comments, types = {}, {}
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        above, number = [], node.lineno - 2
        while lines[number].strip().startswith("#"):
            above.insert(0, lines[number].strip("# "))
            number -= 1
        _, hash_sign, after = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
        name = getattr(node.target, "id", "")
        comments[name] = " ".join([*above, after] if hash_sign else above)
        types[name] = _type_words(ast.unparse(node.annotation))
    return comments, types


def _type_words(text: str) -> str:
    text = re.sub(r"Annotated\[([\w.]+), .*?\]$", r"\1", text)
    text = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace("'", ""), text)
    names = {"CountOrZero": "int ≥ 0", "Count": "int ≥ 1", "NotNegative": "float ≥ 0", "Positive": "float > 0"}
    for name, words in {**names, "Probability": "0 … 1", "Mapping[str, OptionValue]": "options"}.items():
        text = re.sub(rf"{re.escape(name)}(?!\w)", words, text)
    return text


# Files, metrics, errors -----------------------------------------------------------------------------------------------


def run_files() -> str:
    """Return the files of a run folder: the docstring of the package that reads and writes them."""
    text = inspect.getdoc(importlib.import_module("patchloom.runs")) or ""
    return (
        "# Files of a run folder\n\n"
        "Copy or move a run folder as a whole. `patchloom verify RUN` compares every file with its checksum. Not every "
        "run has every file; modules are those of `patchloom.runs`.\n\n" + text + "\n"
    )


def metrics() -> str:
    """Return the metrics: the tables of the pages on evaluation and tasks that define them."""
    page = [
        "# Metrics",
        "",
        "Every metric has one name, in tables, in `--json`, in `metrics.jsonl` and in Python. This list is collected "
        "from the pages that define them.",
        "",
    ]
    for source in ("evaluation", "imbalance", "multilabel", "regression"):
        text = (ROOT / "docs" / f"{source}.md").read_text("utf-8")
        rows = []
        for head, block in re.findall(r"(?m)^(\| name \|.*)\n\|[-| ]+\n((?:\|.*\n)+)", text):
            del head
            rows += [
                tuple(part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1])[:2] for line in block.splitlines()
            ]
        if rows:
            title = text.splitlines()[0].removeprefix("# ")
            rows = [(name, re.sub(r"\]\((\w+\.md)", r"](../\1", meaning)) for name, meaning in rows]
            page += [f"## {title}", "", f"[{title}](../{source}.md) explains them.", "", table(("name", "value"), rows)]
    for task, module in (("Segmentation", segmentation), ("Detection", detection)):
        page += [f"## {task}", "", docstring(module)]
    return "\n".join(page)


def error_page() -> str:
    """Return the error classes with their exit codes and fixes."""
    rows = []
    for name in sorted(errors.__all__, key=lambda name: (getattr(errors, name).exit_code, name)):
        kind = getattr(errors, name)
        meaning, _, fix = (inspect.getdoc(kind) or "").partition("\n\n")
        rows.append((str(kind.exit_code), f"`patchloom.{name}`", cell(meaning), cell(fix)))
    return (
        "# Errors and exit codes\n\n"
        "An error is one line on standard error that says what is wrong and what to do, and an exit code. "
        "`-v` adds the traceback. In Python, the same line is the message of an exception; `patchloom.PatchloomError` "
        "is the base of all of them.\n\n"
        + table(("exit code", "exception", "meaning", "what to do"), rows)
        + "\nA command that is stopped by a signal ends with 128 plus the number of the signal, as is usual "
        "(130 after Ctrl-C): a training has then saved its state, and the same command resumes it. Exit code 0 means "
        "success. Anything else is a bug: please report it with the output of `-v`.\n"
    )


PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands,
    "reference/python.md": python,
    "reference/recipes.md": recipe_fields,
    "reference/run_files.md": run_files,
    "reference/metrics.md": metrics,
    "reference/errors.md": error_page,
}


if __name__ == "__main__":
    for page_name, make in PAGES.items():
        target = Path(sys.argv[1]) / page_name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(make(), "utf-8")
