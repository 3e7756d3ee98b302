"""Whole translation runs on small text: every recipe takes steps, a run resumes exactly, mistakes are found at once."""

import json
import signal
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from patchloom.data.reading_options import Reading
from patchloom.data.text.pairs import open_parallel
from patchloom.engine import loop
from patchloom.engine.distribution import Processes
from patchloom.engine.signals import Stopped
from patchloom.recipes import get_recipe, list_recipes
from patchloom.runs.checkpoints import find_checkpoint
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.translation.evaluation import evaluate_text
from patchloom.training.assemble import make_run
from patchloom.training.run import make_plan, run_training
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from patchloom_runtime.text.vocabulary import Vocabulary
from tests.forked import rank_places
from tests.messages import missing, refused
from tests.reliability.commands import forked
from tests.tasks.translation.translation_runs import DATA, command_line, settings
from tests.training.test_training import TwoSteps

TRANSLATION = [name for name in list_recipes() if get_recipe(name).objective.method == "translation"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    said: list[str] = []
    result = run_training(settings(folder), say=said.append)
    return folder, result, said


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["kind"], r["weights"], r["values"]) for r in lines]


@pytest.mark.parametrize("name", TRANSLATION)
def test_every_recipe_takes_two_steps(name, tmp_path) -> None:
    changes = {"schedule.warmup_steps": get_recipe(name).schedule.warmup_steps, "model.dropout": 0.3}
    processes = Processes("fp32", device="cpu")
    plan = make_plan(settings(tmp_path, recipe=name, changes=changes), "cpu")
    plan = plan.task.training.prepare(plan, processes)
    run, _, _ = make_run(plan, processes, str)
    run.loader, run.evaluators, run.metric, run.saver = TwoSteps(run.loader), (), None, None
    run.schedule = type(run.schedule)(plan.recipe.optim, type(plan.recipe.schedule)(epochs=1, decay="constant"), 2)
    before = {key: tensor.clone() for key, tensor in run.model.state_dict().items()}
    assert loop.train(run).progress.step == 2
    after = run.model.state_dict()
    assert any(not torch.equal(tensor, before[key]) for key, tensor in after.items())
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


def test_what_a_run_leaves(whole) -> None:
    folder, result, said = whole
    for name in ("config.json", "recipe.yaml", "vocabulary.model", "data.json", "val.json", "run.json", "report.html"):
        assert (folder / name).is_file(), name
    config = json.loads((folder / "config.json").read_text())
    assert (config["source"], config["target"]) == ("en", "de")
    train, encode = open_parallel(DATA).train, result.translator.vocabulary.encode
    assert config["longest"] == [max(len(encode(pair[side])) for pair in train) for side in (0, 1)]
    assert {"bleu", "chrf", "exact", "loss", "perplexity"} <= set(result.metrics)
    assert result.summary()["ended"] == "finished"
    assert any(missing(line, "numbers", "en → de", 150) == [] for line in said)
    assert any("nrefs:1|case:mixed" in line for line in said)
    kinds = {(kind, weights) for _, kind, weights, _ in records(folder)}
    assert kinds == {("train", "model"), ("evaluation", "model"), ("evaluation", "average")}
    losses = [v["loss"] for _, kind, weights, v in records(folder) if (kind, weights) == ("evaluation", "model")]
    assert losses[-1] < losses[0]
    page = (folder / "report.html").read_text()
    for place in ("curves", "samples", "pictures"):
        assert f'<section id="{place}">' in page
    drawn = page.partition('<section id="pictures">')[2].partition("</section>")[0]
    assert drawn.count("data:image") >= 1  # the mixing of positions
    assert drawn.count("<svg") >= 1  # where the decoder looks


def test_the_weights_kept_are_the_best_of_model_and_average(whole) -> None:
    folder, _, _ = whole
    found = find_checkpoint(folder)
    evaluated = [(v["loss"], weights) for _, kind, weights, v in records(folder) if kind == "evaluation"]
    assert found.snapshot.values["progress"]["best"] == min(evaluated)[0]
    assert found.snapshot.values["progress"]["best_weights"] == min(evaluated)[1]


def test_the_average_is_that_of_the_last_epochs(tmp_path, monkeypatch) -> None:
    kept = []
    evaluate = loop._Loop.evaluate

    def remembered(self, epoch, caught):
        kept.append({name: tensor.clone() for name, tensor in self.run.model.state_dict().items()})
        evaluate(self, epoch, caught)
        if averaged := self.run.averaged:
            two = kept[-2:]
            for name, tensor in averaged.state_dict().items():
                assert torch.equal(tensor, (two[0][name] + two[1][name]) / 2), name

    monkeypatch.setattr(loop._Loop, "evaluate", remembered)
    run_training(settings(tmp_path), say=str)
    assert len(kept) == 3


@pytest.mark.parametrize("step", [2, 7])
def test_a_run_stopped_in_mid_epoch_ends_with_the_same_weights(step, whole, tmp_path, monkeypatch) -> None:
    update = loop._Loop.update

    def interrupted(self, *arguments):
        if self.progress.step == step:
            signal.raise_signal(signal.SIGTERM)
        return update(self, *arguments)

    monkeypatch.setattr(loop._Loop, "update", interrupted)
    with pytest.raises(Stopped):
        run_training(settings(tmp_path), say=str)
    monkeypatch.undo()
    # The vocabulary is the run's: it is not learned again.
    monkeypatch.setattr("patchloom.tasks.translation.training.learn_vocabulary", None)
    said: list[str] = []
    run_training(settings(tmp_path), say=said.append)
    assert any(missing(line, tmp_path, step + 1) == [] for line in said)
    folder, _, _ = whole
    assert (tmp_path / "weights.safetensors").read_bytes() == (folder / "weights.safetensors").read_bytes()
    one, other = (find_checkpoint(each).snapshot.tensors for each in (tmp_path, folder))
    assert one.keys() == other.keys()
    for part, tensors in one.items():
        assert all(torch.equal(tensor, other[part][name]) for name, tensor in tensors.items()), part
    assert records(tmp_path) == records(folder)


def test_two_processes_learn_as_one(tmp_path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_training(settings(one, epochs=2, changes={"model.dropout": 0}), say=str)
    line = [*command_line(two, epochs=2), "--set", "model.dropout=0"]
    processes = [forked(*line, env=place) for place in rank_places(2)]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, output + errors
    given, expected = (load_file(folder / "weights.safetensors") for folder in (two, one))
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    for (*a, values), (*b, others) in zip(records(two), records(one), strict=True):
        assert a == b
        assert values["loss"] == pytest.approx(others["loss"], rel=1e-4)


def test_a_finished_run_goes_on_for_longer_and_another_starts_from_it(whole, tmp_path) -> None:
    folder, _, _ = whole
    said: list[str] = []
    run_training(settings(tmp_path / "next", init=str(folder), epochs=1), say=said.append)
    assert (tmp_path / "next" / "vocabulary.model").read_bytes() == (folder / "vocabulary.model").read_bytes()
    first = records(tmp_path / "next")[0][3]["loss"]
    assert first < records(folder)[0][3]["loss"]
    longer = run_training(settings(tmp_path / "next", init=str(folder), epochs=2), say=str)
    assert longer.outcome.progress.epoch == 2


@pytest.mark.parametrize("model", ["translation_resmlp_6", "translation_transformer_base"])
def test_half_precision_runs_are_judged_too(model, tmp_path) -> None:
    given = {"model": model, "epochs": 1, "changes": {"precision": "bf16"}}
    result = run_training(settings(tmp_path, **given), say=str)
    assert result.outcome.ended == "finished"


def test_a_dry_run_writes_nothing(tmp_path) -> None:
    said: list[str] = []
    run_training(settings(tmp_path / "run"), dry_run=True, say=said.append)
    assert not (tmp_path / "run").exists()
    assert any("tokens/s" in line for line in said)


def test_a_time_limit_in_the_first_epoch(tmp_path) -> None:
    result = run_training(settings(tmp_path, stop_after="0.001s"), say=str)
    assert result.outcome.ended == "time limit"
    assert patchloom.load(tmp_path, device="cpu").source == "en"


def write(folder, **sides) -> str:
    folder.mkdir(exist_ok=True)
    for name, lines in sides.items():
        data = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        (folder / name.replace("_", ".")).write_bytes(data)
    return str(folder)


WORDS = [f"word{i % 7} a{i}" for i in range(30)]


def test_lines_that_cannot_be_trained_on_are_named(tmp_path) -> None:
    source = [*WORDS, "", "x" * 10_000, "日本 ☃"]
    target = [*WORDS, "nothing", "too long", "characters"]
    text = write(tmp_path / "text", train_en=source, train_de=target, val_en=WORDS[:5], val_de=WORDS[:5])
    run = tmp_path / "run"
    result = run_training(settings(run, text, epochs=1, changes={"text.vocabulary": 300}), say=str)
    assert result.left_out == 2
    left_out = (run / "left_out.tsv").read_text().splitlines()
    assert left_out[1].startswith(f"{text}/train.en, line 31\t")
    assert left_out[2].startswith(f"{text}/train.de, line 32\t")
    assert missing(left_out[2], 39) == []
    with refused(DataError, "train.en", 31, 1):
        run_training(settings(tmp_path / "other", text, strict=True, changes={"text.vocabulary": 300}), say=str)


@pytest.mark.parametrize(
    ("sides", "changes", "facts"),
    [
        ({"train_en": WORDS, "train_de": WORDS[1:]}, {}, ("train.en", 30, "train.de", 29)),
        ({"train_en": WORDS, "train_de": b"a\n\xff\n"}, {}, ("train.de", 2, 1, "0xff")),
        ({"train_en": WORDS, "train_de": WORDS}, {"text.target": "fr"}, ("fr", "de-en")),
        ({"train_en": WORDS, "train_de": WORDS, "train_fr": WORDS}, {}, ("--set text.source=", "--set text.target=")),
        ({"train_en": WORDS}, {}, ("text",)),
        ({"train_en": WORDS, "train_de": WORDS}, {"text.vocabulary": 262}, (262,)),
    ],
)
def test_mistakes_in_the_text_are_one_line(sides, changes, facts, tmp_path) -> None:
    text = write(tmp_path / "text", **sides)
    with refused((DataError, UsageError), *facts):
        run_training(settings(tmp_path / "run", text, changes=changes), say=str)
    assert not (tmp_path / "run" / "weights.safetensors").exists()


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"size": 32}, ("--size",)),
        ({"shard": True}, ("--shard",)),
        ({"patience": 0}, ("--patience", 0, 1)),
        ({"init": "nowhere"}, ("--init", "nowhere")),
        ({"changes": {"objective.method": "classification"}}, ("numbers",)),
        ({"model": "resmlp_s12"}, ("resmlp_s12",)),
        ({"changes": {"model.options.max_length": 9}}, ("model.options.max_length", "text.max_length")),
        ({"batch": 5}, (5,)),
    ],
)
def test_mistakes_in_the_options_are_one_line(given, facts, tmp_path) -> None:
    with refused(UsageError, *facts):
        run_training(settings(tmp_path, **given), say=str)


READING = {"ignore": 255, "classes": "innermost", "val": "held-out"}


@pytest.mark.parametrize("option", [field.name for field in fields(Reading)])
def test_options_for_reading_images_are_refused(option, tmp_path) -> None:
    with refused(UsageError, f"--{option.replace('_', '-')}"):
        make_plan(settings(tmp_path, **{option: READING.get(option, "x")}), "cpu")


def test_text_without_its_recipe_is_told_of_it(tmp_path) -> None:
    for data in ("numbers", write(tmp_path / "text", train_en=WORDS, train_de=WORDS)):
        with refused(UsageError, data, "--recipe translation-small"):
            run_training(TrainingSettings(data=data, out=str(tmp_path / "run"), device="cpu"), say=str)


def test_another_direction_is_another_run(whole) -> None:
    folder, _, _ = whole
    with refused(UsageError, folder, "text.source en → fr", "text.target de → en"):
        run_training(settings(folder, "numbers:count=150,fr-en"), say=str)
    with refused(DataError, folder, "numbers:count=150", "numbers:count=160", "--out"):
        run_training(settings(folder, "numbers:count=160", epochs=4), say=str)


def test_a_changed_vocabulary_is_refused(tmp_path) -> None:
    run_training(settings(tmp_path, epochs=1), say=str)
    other = Vocabulary.train(WORDS, 300)
    (tmp_path / "vocabulary.model").write_bytes(other.to_bytes())
    for attempt in (
        lambda: patchloom.load(tmp_path, device="cpu"),
        lambda: run_training(settings(tmp_path, epochs=2), say=str),
    ):
        with refused(CheckpointError, "vocabulary.model"):
            attempt()


@pytest.mark.slow
def test_numbers_are_learned(tmp_path) -> None:
    """The first try of docs/translation.md."""
    run_training(TrainingSettings(data="numbers", recipe="translation_tiny", out=str(tmp_path), device="cpu"), say=str)
    judged = evaluate_text(patchloom.load(tmp_path, device="cpu"), "numbers")["test"]
    assert judged.scores.exact > 90
