"""Commands from settings classes: each field that carries an `Option` becomes an option of the command.

A verb is a function of one settings value. `settings_parameters` gives typer the parameters it expects and
`read_settings` turns what typer parsed back into the value.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from patchloom.data.reading_options import Reading
from patchloom.options import HARDWARE, IMAGES, OUTPUT, Argument, Option
from patchloom_runtime.errors import UsageError

RUNS = Path("runs")  # where a shell looks for runs to complete

# Options that several commands share, with one meaning and one help text.
Device = Annotated[str, Option("cpu, cuda, cuda:1 or mps; auto uses a GPU if there is one.")]
Split = Annotated[str | None, Option("train, val, test or all. Default: val, or the images the run held out.")]
Json = Annotated[bool, Option("Print JSON.", name="json", panel=OUTPUT)]
DryRun = Annotated[bool, Option("Print what would be done and exit.")]
Batch = Annotated[int, Option("Images per batch.", panel=HARDWARE)]
Workers = Annotated[int, Option("Processes that read images.", panel=HARDWARE)]
Level = Annotated[
    str | None, Option("Label level to compare with. Default: that of the model's classes.", panel=IMAGES)
]
Trunk = Annotated[bool, Option("Use the vectors before the projector of a run that has one.")]
IndexRun = Annotated[str | None, Option("Run of the index, if it was moved.", metavar="RUN", complete="run")]


@dataclass(frozen=True)
class OmitFields:
    """Marks a field of type `Reading`: its options are those of `Reading` without these."""

    names: tuple[str, ...] = ()


ReadingOptions = Annotated[Reading, OmitFields(("exclude", "val"))]


def parse_pairs(texts: list[str]) -> dict[str, str]:
    """Parse 'augment.mixup=0' into {'augment.mixup': '0'}."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes field=value, such as augment.mixup=0; got {text!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def parse_counts(option: str, text: str, example: str) -> list[int]:
    """Parse '1,16,64' into [1, 16, 64]."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} takes numbers with commas, such as {example}; got {text!r}")
    return numbers


def settings_of(function: Callable[..., None]) -> type:
    """Return the settings class of a verb: the type of its one parameter."""
    (name,) = inspect.signature(function).parameters
    settings: type = get_type_hints(function)[name]
    return settings


def settings_parameters(settings: type) -> list[inspect.Parameter]:
    """Return the parameters that typer makes the options of a command from."""
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in _parameters(settings)
    ]


def read_settings(settings: type, values: Mapping[str, Any]) -> Any:
    """Return the settings that typer's values stand for."""
    read: dict[str, Any] = {}
    for field, hint in _hints(settings):
        if (omitted := _omitted(hint)) is not None:
            names = [name for name in _reading_options() if name not in omitted.names]
            read[field.name] = Reading(**{name: values[name] for name in names})
        elif field.name in values:
            read[field.name] = _value(hint, values[field.name])
    return settings(**read)


def keywords(settings: Any, *leave_out: str) -> dict[str, Any]:
    """Return settings as keywords for the Python function of the same name, by the names of the options."""
    return {
        _name(field.name, hint): getattr(settings, field.name)
        for field, hint in _hints(type(settings))
        if field.name not in leave_out and field.name != "as_json"
    }


def changed(settings: Any, *names: str) -> list[str]:
    """Return those of these options that differ from their defaults, as they are typed: --crop-ratio."""
    defaults = {field.name: field.default for field in fields(settings)}
    return [spelled(name) for name in names if getattr(settings, name) != defaults[name]]


def spelled(name: str) -> str:
    """Return crop_ratio as --crop-ratio."""
    return f"--{name.replace('_', '-')}"


def _parameters(settings: type) -> list[tuple[str, Any, Any]]:
    parameters: list[tuple[str, Any, Any]] = []
    for field, hint in _hints(settings):
        if (omitted := _omitted(hint)) is not None:
            parameters += [each for each in _parameters(Reading) if each[0] not in omitted.names]
        elif option := _option(field.name, hint):
            parameters.append((field.name, _annotation(field.name, hint, option, field), _default(field)))
    return parameters


def _hints(settings: type) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(settings, include_extras=True)
    return [(field, hints[field.name]) for field in fields(settings)]


def _reading_options() -> dict[str, Option]:
    return {field.name: option for field, hint in _hints(Reading) if (option := _marked(hint, Option))}


def _option(name: str, hint: Any) -> Option | None:
    """Return the option of a field; a field named as one of `Reading` may share that one's."""
    return _marked(hint, Option) or _reading_options().get(name)


def _omitted(hint: Any) -> OmitFields | None:
    return _marked(hint, OmitFields)


def _marked(hint: Any, kind: type) -> Any:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def _name(name: str, hint: Any) -> str:
    option = _option(name, hint)
    return option.name.replace("-", "_") if option and option.name else name


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _typer_type(hint: Any, option: Option) -> Any:
    """Return the type that typer parses: paths and recipes are text, mappings and tuples are repeated options."""
    plain = _plain(hint)
    if isinstance(option, Argument) and get_origin(plain) is tuple:
        return list[str]
    if get_origin(plain) in (dict, tuple):
        return list[str] | None
    if get_origin(plain) not in (Union, types.UnionType):
        return plain
    kinds = get_args(plain)
    kind = str if str in kinds else next(kind for kind in kinds if kind is not type(None))
    return kind | None if type(None) in kinds else kind


def _value_word(kind: Any) -> str | None:
    """Return the word for a value in the help. Flags and choices have none: typer shows the choices."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    words = {str: "TEXT", int: "N", float: "NUMBER", list[str]: "TEXT"}
    return next((words[each] for each in kinds if each in words), None)


def _annotation(name: str, hint: Any, option: Option, field: Field[Any]) -> Any:
    kind = _typer_type(hint, option)
    metavar = option.metavar or (name.upper() if isinstance(option, Argument) else _value_word(kind))
    shared: dict[str, Any] = {"help": option.help, "metavar": metavar, "rich_help_panel": option.panel}
    if option.complete:
        shared["autocompletion"] = completer(option.complete)
    if isinstance(option, Argument):
        return Annotated[kind, typer.Argument(**shared)]
    written = spelled(option.name or name)
    if (kind is bool and field.default is True) or kind == bool | None:
        written = f"{written}/--no-{written[2:]}"
    if option.environment:
        shared |= {"envvar": option.environment, "show_envvar": True}
    return Annotated[kind, typer.Option(written, min=option.minimum, max=option.maximum, **shared)]


def _default(field: Field[Any]) -> Any:
    if field.default is MISSING:
        return inspect.Parameter.empty if field.default_factory is MISSING else None
    return field.default or None if isinstance(field.default, tuple) else field.default


def _value(hint: Any, value: Any) -> Any:
    """Convert what typer parsed to the type of the field."""
    plain = _plain(hint)
    if get_origin(plain) is tuple:
        return tuple(value or ())
    return parse_pairs(value or []) if get_origin(plain) is dict else value


def completer(kind: Literal["model", "recipe", "run"]) -> Callable[[str], list[str]]:
    """Return the completion of a kind of names. It runs at every press of a key, so it loads no torch."""
    return {"model": _complete_model, "recipe": _complete_recipe, "run": _complete_run}[kind]


def _complete_model(incomplete: str) -> list[str]:
    from patchloom.models.catalog import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


def _complete_recipe(incomplete: str) -> list[str]:
    from patchloom.recipes import list_recipes

    return [name for name in ("auto", *list_recipes()) if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    """Return run folders and published weights that begin so; the shell adds paths as always."""
    runs = [str(config.parent) for config in sorted(RUNS.glob("*/config.json"))]
    runs = [run for run in runs if run.startswith(incomplete)]
    if not incomplete:
        return runs
    from patchloom.models.pretrained.table import WEIGHTS

    return runs + [weights.name for weights in WEIGHTS if weights.name.startswith(incomplete)]
