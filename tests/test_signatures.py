"""What an editor shows of patchloom's functions is what they take; a wrong option is answered by the nearest."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest
from torch import nn

import patchloom
from patchloom import cli
from patchloom.cli.app import AppOptions
from patchloom.cli.audit import AuditOptions
from patchloom.cli.bench import BenchOptions
from patchloom.cli.calibrate import CalibrateOptions
from patchloom.cli.check import CheckOptions
from patchloom.cli.compare import CompareOptions
from patchloom.cli.convert import ConvertOptions
from patchloom.cli.evaluate import EvaluateOptions
from patchloom.cli.export import ExportOptions
from patchloom.cli.index import IndexOptions
from patchloom.cli.options import settings_parameters
from patchloom.cli.pack import PackOptions
from patchloom.cli.predict import PredictOptions
from patchloom.cli.probe import ProbeOptions
from patchloom.cli.prune import PruneOptions
from patchloom.cli.report import ReportOptions
from patchloom.cli.search import SearchOptions
from patchloom.cli.serve import ServeOptions
from patchloom.cli.sign import SignOptions
from patchloom.cli.soup import SoupOptions
from patchloom.cli.sweep import SweepOptions
from patchloom.cli.train import TrainOptions
from patchloom.cli.translate import TranslateOptions
from patchloom.cli.verify import VerifyOptions
from patchloom.cli.watch import WatchOptions
from patchloom.data.sources.specs import Data
from patchloom.inference.classifier import Classifier
from patchloom.inference.evaluation_methods import (
    EvaluationKeywords,
    EvaluationSettings,
    ProbeKeywords,
    ViewKeywords,
)
from patchloom.options import Option
from patchloom.recipes.schema import Recipe
from patchloom.tasks.report import report
from patchloom.tasks.settings import TrainingSettings
from patchloom_runtime.errors import UsageError
from tests.messages import refused

FUNCTIONS = [patchloom.train, patchloom.load, patchloom.evaluate, patchloom.evaluate_levels, patchloom.index]
FUNCTIONS += [patchloom.sweep, patchloom.audit, patchloom.prune, patchloom.predict, patchloom.watch]
FUNCTIONS += [patchloom.search, patchloom.translate, report]
FUNCTIONS += [patchloom.open_index, patchloom.check, patchloom.open_data, patchloom.look]
FUNCTIONS += [
    patchloom.pack,
    patchloom.probe,
    patchloom.compare,
    patchloom.bench,
    patchloom.convert,
    patchloom.sign,
    patchloom.verify,
    patchloom.export,
    patchloom.serve,
    patchloom.app,
]
METHODS = [
    Classifier.predict,
    Classifier.embed,
    Classifier.look,
    Classifier.evaluate,
    Classifier.probe,
    Classifier.sweep,
]
WITHOUT_A_SPLIT = {
    "split",
    "real",
    "v2",
    "tta",
    "progress",
}  # of no use to probes and levels, which need train and val


OPTION_NAMES = {"changes": "set", "compiled": "compile", "trackers": "log"}  # field of TrainingSettings → option


def test_train_takes_the_settings_of_a_training() -> None:
    """A new field of TrainingSettings also belongs in `train`, with a line in its docstring."""
    own = dict(inspect.signature(patchloom.train).parameters)
    assert own.pop("dry_run").default is False
    # Any there: `--help` does not load recipes; and a module has a name there.
    model = str | nn.Module | Callable[..., nn.Module] | None
    hints = get_type_hints(TrainingSettings) | {"recipe": str | Recipe, "model": model}
    fields = {OPTION_NAMES.get(field.name, field.name): field for field in dataclasses.fields(TrainingSettings)}
    add = "add it to the signature and the docstring of training/train.py"
    assert list(own) == list(fields), f"train and TrainingSettings differ in {set(own) ^ set(fields)}; {add}"
    for name, field in fields.items():
        if name == "data":
            assert own[name].annotation == Data
            continue
        default, kind = own[name].default, hints[field.name]
        if field.default_factory is not dataclasses.MISSING:  # a new value each time: None stands for it
            assert (default, own[name].annotation) == (None, kind | None), name
        else:
            assert (default, own[name].annotation) == (field.default, kind), name


@pytest.mark.parametrize(
    ("old", "value"), [("changes", {"augment.mixup": 0}), ("compiled", False), ("trackers", ("tensorboard",))]
)
def test_train_takes_old_keywords_with_a_warning(old: str, value: object, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr("patchloom.training.train.run_training", lambda settings, **_: calls.append(settings))
    with pytest.warns(DeprecationWarning, match=f"{old}.*{OPTION_NAMES[old]}"):
        patchloom.train("digits", **{old: value})
    patchloom.train("digits", **{OPTION_NAMES[old]: value})
    assert calls[0] == calls[1]
    assert getattr(calls[0], old) == value


@pytest.mark.parametrize(
    ("keywords", "without"),
    [(EvaluationKeywords, set()), (ProbeKeywords, WITHOUT_A_SPLIT), (ViewKeywords, WITHOUT_A_SPLIT | {"level"})],
)
def test_keywords_of_evaluations_are_the_fields_of_their_settings(keywords: type, without: set[str]) -> None:
    fields = {field.name: field.type for field in dataclasses.fields(EvaluationSettings) if field.name not in without}
    assert get_type_hints(keywords) == fields


@pytest.mark.parametrize(
    ("function", "without"),
    [
        (patchloom.evaluate, set()),
        (Classifier.evaluate, set()),
        (Classifier.sweep, set()),
        (Classifier.probe, WITHOUT_A_SPLIT),
        (patchloom.evaluate_levels, WITHOUT_A_SPLIT | {"level"}),
    ],
)
def test_evaluations_take_what_can_be_said_of_pictures(function, without: set[str]) -> None:
    """A new field of EvaluationSettings is an option of every evaluation."""
    own = inspect.signature(function).parameters
    fields = {field.name: field for field in dataclasses.fields(EvaluationSettings) if field.name not in without}
    missing = set(fields) - set(own)
    assert not missing, f"{function.__qualname__} lacks {missing}: add it to the signature and the docstring"
    assert not without & set(own)
    for name, field in fields.items():
        assert (own[name].default, own[name].annotation) == (field.default, field.type), name


# Verb → its settings class, the Python function, and names that only one of them has.
VERBS: dict[str, tuple[type, object, set[str], set[str]]] = {
    "check": (CheckOptions, patchloom.check, {"page", "list", "strict"}, {"progress"}),
    "pack": (PackOptions, patchloom.pack, set(), {"progress"}),
    "sweep": (SweepOptions, patchloom.sweep, set(), {"say"}),
    "audit": (AuditOptions, patchloom.audit, {"page"}, {"say"}),
    "index": (IndexOptions, patchloom.index, {"dry_run"}, {"progress"}),
    "export": (ExportOptions, patchloom.export, {"dry_run"}, set()),
    "calibrate": (CalibrateOptions, patchloom.calibrate, set(), {"progress"}),
    "prune": (PruneOptions, patchloom.prune, {"dry_run", "page"}, {"reading"}),
    "predict": (PredictOptions, patchloom.predict, set(), set()),
    "soup": (SoupOptions, patchloom.soup, set(), {"reading"}),
    "watch": (WatchOptions, patchloom.watch, {"page", "every", "once"}, set()),
    "bench": (BenchOptions, patchloom.bench, {"memory"}, set()),
    "report": (ReportOptions, report, set(), set()),
    "search": (SearchOptions, patchloom.search, {"page"}, set()),
    "translate": (
        TranslateOptions, patchloom.translate, {"file", "scores", "out", "replace"}, {"lines"},
    ),
    "serve": (ServeOptions, patchloom.serve, set(), {"on_start"}),
    "app": (AppOptions, patchloom.app, set(), {"on_start"}),
    "sign": (SignOptions, patchloom.sign, set(), set()),
    "verify": (VerifyOptions, patchloom.verify, set(), set()),
    "convert": (ConvertOptions, patchloom.convert, set(), set()),
    "probe": (ProbeOptions, patchloom.probe, {"levels"}, set()),
    "compare": (
        CompareOptions, patchloom.compare, {"text", "multi_scale", "mode", "seeds", "cost"}, set(),
    ),
    "evaluate": (
        EvaluateOptions, patchloom.evaluate, {"text", "multi_scale", "mode", "sweep", "cost"}, {"heads", "progress"},
    ),
}  # fmt: skip
POSITIONAL = {"paths", "runs", "data", "spec"}
PARSED = {"grid", "set", "knn", "batches", "shares", "bits", "condition"}  # text on the command line, values in Python


@pytest.mark.parametrize("verb", VERBS)
def test_commands_and_functions_take_the_same_options_with_the_same_defaults(verb: str) -> None:
    settings, function, only_command, only_function = VERBS[verb]
    own = dict(inspect.signature(function).parameters)
    fields = {}
    for field in dataclasses.fields(settings):
        hint = get_type_hints(settings, include_extras=True)[field.name]
        option = next((mark for mark in get_args(hint)[1:] if isinstance(mark, Option)), None)
        fields[option.name if option and option.name else field.name] = field
    del fields["json"]
    assert set(fields) - only_command - POSITIONAL == set(own) - only_function - POSITIONAL
    for name in set(fields) & set(own) - PARSED - POSITIONAL:
        default = fields[name].default
        empty = default is dataclasses.MISSING
        assert own[name].default == (inspect.Parameter.empty if empty else default), name


DESCRIBED = {
    "train": (TrainOptions, patchloom.train),
    "probe --levels": (ProbeOptions, patchloom.evaluate_levels),
    **{verb: row[:2] for verb, row in VERBS.items()},
}
# Sentences of a help text about typing the option, which the docstring of the function omits.
ABOUT_TYPING = re.compile(
    r" ?\b(Repeatable|Without a value: \d+|With --levels: separability|Quote several parts of one: 'a/ b/'"
    r"|Patterns such as 'cait_\*' work too|Prefer the environment variable: other users can see command lines)\."
)


@pytest.mark.parametrize("verb", DESCRIBED)
def test_docstrings_explain_options_in_the_words_of_the_help(verb: str) -> None:
    """A docstring may add sentences after the words of the help, and quotes to values."""
    settings, function = DESCRIBED[verb]
    entries = _docstring_entries(function)
    missing = set(inspect.signature(function).parameters) - set(entries)
    assert not missing, f"the docstring of {verb} does not explain {missing}"
    texts = {name: text for name, text in _help_texts(settings).items() if name in entries}
    assert texts
    for name, text in texts.items():
        assert _plain(entries[name]).startswith(_plain(text)), f"{verb}: {name}"


def _docstring_entries(function: object) -> dict[str, str]:
    """Return the list of options in a docstring; the first entry of a name counts."""
    entries = re.findall(r"(?m)^( *)(\w+) {2,}(\S.*(?:\n\1 {4,}\S.*)*)", inspect.getdoc(function) or "")
    return {name: text for _, name, text in reversed(entries)}


def _help_texts(settings: type) -> dict[str, str]:
    texts = {}
    for parameter in settings_parameters(settings):
        shown = get_args(parameter.annotation)[1]
        written = shown.param_decls[0] if shown.param_decls else parameter.name  # --compile/--no-compile
        texts[written.partition("/")[0].lstrip("-").replace("-", "_")] = shown.help
    return texts


def _plain(text: str) -> str:
    """Return a text without quotes, with option names as in Python."""
    text = re.sub(r"--([a-z][\w-]*)", lambda match: match[1].replace("-", "_"), ABOUT_TYPING.sub("", text))
    return " ".join(re.sub(r"['`]", "", text).split())


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda function: function.__qualname__)
def test_every_option_has_a_name_a_type_and_an_explanation(function) -> None:
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        assert parameter.kind is not parameter.VAR_KEYWORD, name
        assert name == "self" or parameter.annotation is not parameter.empty, name
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
    assert function.__doc__


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: patchloom.train("digits", epoch=3), ("train", "epoch", "epochs")),
        (lambda: patchloom.load("runs/a", devices="cpu"), ("load", "devices", "device")),
        (lambda: patchloom.evaluate("a", "b", crop=1), ("evaluate", "crop", "crop_ratio")),
        (
            lambda: patchloom.index("a", ["b"], out="c", batches=1),
            ("index", "batches", "batch"),
        ),
        (lambda: patchloom.check("a", worker=1), ("check", "worker", "workers")),
        (lambda: patchloom.open_data("a", zzzz=1), ("open_data", "zzzz")),
    ],
)
def test_an_unknown_option_is_answered_by_the_nearest(call, facts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert set(facts) <= set(re.findall(r"\w+", str(error.value)))


def test_what_python_itself_refuses_stays_its_own() -> None:
    with pytest.raises(TypeError, match="'data'"):
        patchloom.train()


@pytest.mark.parametrize(("old", "new"), [("evaluate_runs", "evaluate"), ("load_translator", "load")])
def test_old_names_work_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"patchloom.{new}$"):
        assert callable(getattr(patchloom, old))
    assert old not in patchloom.__all__


def test_evaluate_has_the_name_of_its_verb() -> None:
    with refused(UsageError, "gone"):
        patchloom.evaluate("gone")


def test_every_verb_has_a_function_of_its_name() -> None:
    verbs = [name for names in cli.VERBS.values() for name in names]
    assert [name for name in verbs if not callable(getattr(patchloom, name, None))] == []


def test_packages_are_called_as_the_verbs_of_their_names(tmp_path) -> None:
    import patchloom.models.registry
    import patchloom.report.page

    assert patchloom.models("cait_x*") == patchloom.list_models("cait_x*")
    assert patchloom.recipes("deit3*") == patchloom.list_recipes("deit3*")
    with refused(UsageError, tmp_path, "config.json"):
        patchloom.report(str(tmp_path))
    assert patchloom.report.page.write_page  # they are packages still
    with refused(UsageError, "pages", "page"):
        patchloom.report("a", pages="b")


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: patchloom.serve("no/run"), ("no/run",)),
        (lambda: patchloom.app("no/run", port=7), ("no/run",)),
        (lambda: patchloom.serve("no/run", batch=0), ("batch", 0)),
        (lambda: patchloom.serve("no/run", deadline=0), ("deadline", 0)),
        (lambda: patchloom.serve("no/run", api_key=""), ("api-key",)),
    ],
)
def test_wrong_options_of_servers_are_refused(call, facts: tuple[object, ...]) -> None:
    with refused(UsageError, *facts):
        call()
