"""Training to translate: what will be run, the objects of it, the loop, the report. `run_training` comes here.

A run's folder has `vocabulary.model` beside what every run has. The vocabulary is learned once, from the sentences to
train on, and then belongs to the run: it is never learned again.
"""

import hashlib
import shlex
import time as clock
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchloom.build import Choice, base_recipe, changed_recipe, is_run, make_seq2seq
from patchloom.checkpoint import Folder, find_checkpoint, read_checkpoint, read_config
from patchloom.data.encoded import EncodedPairs, encode_pairs, learn_vocabulary
from patchloom.data.pairs import LeftOut, ParallelText, open_parallel
from patchloom.data.token_batches import TokenLoader
from patchloom.data.vocabulary import Vocabulary
from patchloom.deployment.data_record import DataRecord
from patchloom.deployment.run_record import FILE as RUN_RECORD
from patchloom.deployment.run_record import RunRecord, write_run_record
from patchloom.deployment.text_evaluation import evaluate_pairs
from patchloom.deployment.translation_files import (
    VOCABULARY,
    load_seq2seq,
    read_translation_files,
    read_vocabulary,
    write_translation_files,
)
from patchloom.deployment.translation_report import keep_val, report_translation
from patchloom.deployment.translator import Translator
from patchloom.engine.disk import Lock, disk_errors, locked
from patchloom.engine.display import duration
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.epoch_average import EpochAverage
from patchloom.engine.loop import Outcome
from patchloom.engine.loop import train as run_loop
from patchloom.engine.optimisation import Schedule, make_optimizer
from patchloom.engine.records import open_records
from patchloom.engine.run import Run
from patchloom.engine.state import load_weights
from patchloom.errors import CheckpointError, DataError, NumericalError, PatchloomError, UsageError
from patchloom.evaluation.translation import token_loss, translation_scores
from patchloom.inspection.cost import human
from patchloom.inspection.report import installed_versions
from patchloom.models.seq2seq import Seq2Seq
from patchloom.objectives.translation import Translation
from patchloom.recipes.schema import Recipe, override
from patchloom.training.assemble import EVALUATIONS, release
from patchloom.training.data_record import (
    LEFT_OUT,
    began_with,
    changes_since,
    default_folder,
    place_of,
    refuse_other_data,
    refuse_other_start,
    write_left_out,
    write_record,
)
from patchloom.training.measuring import Measured, measure, told
from patchloom.training.memory import micro_batches
from patchloom.training.plan import TrainingSettings, check_numbers, folder_name, same_run, seconds_of
from patchloom.training.planned import planned
from patchloom.training.run import (
    Trained,
    already_ended,
    guarded,
    has_ended,
    heard_or_not,
    machine_of,
    silent,
    with_best_weights,
    with_files,
)

# Sentences of val that are translated, greedily, at every evaluation; a second or so.
GREEDY_SENTENCES = 200
# Settings that are about images.
_OF_IMAGES = ("teacher", "size", "pictures", "workers", "worker_timeout", "shard", "level", "labels", "taxonomy", "fit")


@dataclass(frozen=True)
class TextPlan:
    """A text and the recipe for it."""

    text: ParallelText
    recipe: Recipe
    choices: list[Choice]
    folder: Path
    settings: TrainingSettings
    why_folder: str = ""  # where it is not runs/NAME

    def lines(self) -> list[str]:
        """The plan for a person, with the reason of each automatic choice."""
        r, t = self.recipe, self.text
        tests = f"; tests: {', '.join(t.tests)}" if t.tests else ""
        return [
            f"data       {t.name}, {t.source} → {t.target}: {len(t.train):,} pairs to train on, "
            f"{len(t.val):,} to validate{tests}",
            *(f"           note: {note}" for note in t.notes),
            f"recipe     {r.name}: {r.schedule.epochs} epochs, {r.optim.name} at {r.optim.peak_lr:.2g}, "
            f"batch {r.optim.batch_size:,} tokens",
            *(f"           {c.key} = {c.value}   ({c.why})" for c in self.choices),
            f"folder     {self.folder}{f'   ({self.why_folder})' if self.why_folder else ''}",
        ]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The text as numbers."""

    vocabulary: Vocabulary
    train: EncodedPairs
    val: EncodedPairs
    record: DataRecord
    left_out: tuple[LeftOut, ...]


def train_translation(
    settings: TrainingSettings,
    device: str,
    *,
    dry_run: bool,
    say: Callable[[str], None],
) -> Trained:
    """Plan it, say it, do it, report it."""
    plan = make_text_plan(settings)
    processes = Processes(plan.recipe.precision, device=device)
    say = heard_or_not(say) if processes.is_main else silent
    for line in plan.lines():
        say(line)
    with ExitStack() as stack:
        stack.callback(processes.close)
        lock = stack.enter_context(locked(plan.folder)) if not dry_run and processes.is_main else None
        corpus = make_corpus(plan, processes)
        run = make_translation_run(plan, corpus, processes)
        stack.callback(release, run)
        for line in _corpus_lines(plan, corpus, run, dry_run=dry_run):
            say(line)
        compiled = ", compiled" if unwrap(run.model) is not run.model else ""
        say(f"machine    {machine_of(processes)}{compiled}")
        if dry_run:
            measured = measure(run)
            say(told(run, measured, EVALUATIONS, "tokens"))
            say("Nothing was trained.   Next: the same command without --dry-run")
            return Trained(plan.folder, None, {}, len(corpus.left_out), _planned(plan, corpus, run, measured))
        return _train_and_report(plan, corpus, run, lock, seconds_of(settings.stop_after, "--stop-after"), say)


def _planned(plan: TextPlan, corpus: Corpus, run: Run, found: Measured) -> dict[str, Any]:
    text = plan.text
    data = {
        "name": text.name,
        "languages": [text.source, text.target],
        "train": len(corpus.train),
        "val": len(corpus.val),
        "notes": list(text.notes),
    }
    return planned(
        plan,
        run,
        data=data,
        seconds=found.total_s(run, EVALUATIONS),
        per_second=found.images_per_s,
        machine=machine_of(run.processes),
    )


# What will be run -----------------------------------------------------------------------------------------------------


def make_text_plan(settings: TrainingSettings) -> TextPlan:
    """What can be wrong with the options, the recipe and the text is found here; the whole text is read once."""
    check_numbers(settings)
    defaults = {field.name: field.default for field in fields(TrainingSettings)}
    for name in _OF_IMAGES:
        if getattr(settings, name) != defaults[name]:
            raise UsageError(f"--{name.replace('_', '-')} is about images; leave it out where text is translated")
    if settings.time:
        raise UsageError(
            "--time plans the training of images; where text is translated give --epochs, or stop with --stop-after"
        )
    if settings.init and not is_run(settings.init):
        raise UsageError(f"--init {settings.init}: no such run")
    base = base_recipe(settings.recipe, settings.model)
    assert base is not None
    recipe, choices = changed_recipe(base, settings.recipe_changes())
    with torch.device("meta"):
        make_seq2seq(recipe, recipe.text.vocabulary)  # a wrong name or option is said before the text is read
    text = open_parallel(settings.data, source=recipe.text.source, target=recipe.text.target, seed=recipe.seed)
    recipe = override(recipe, {"text.source": text.source, "text.target": text.target})
    folder, why = Path(settings.out or ""), ""
    if not settings.out:  # the sentences are compared once they are numbers of the folder's vocabulary
        place = place_of(settings.data)
        folder, why = default_folder(
            folder_name(settings.data), settings.init, lambda before: before.place in (None, place)
        )
    same_run(folder, recipe)
    return TextPlan(text, recipe, choices, folder, settings, why)


def make_corpus(plan: TextPlan, processes: Processes) -> Corpus:
    """The run's vocabulary, and train and val in it; every process reads the text, all must find the same."""
    text, recipe = plan.text, plan.recipe
    vocabulary = _from_main(processes, lambda: _vocabulary(plan))
    longest = recipe.text.max_length
    train = encode_pairs(text.train, vocabulary, max_length=longest, max_ratio=recipe.text.max_ratio)
    val = encode_pairs(text.val, vocabulary, max_length=longest, max_ratio=None)
    left_out = (*text.left_out, *train.left_out)
    if plan.settings.strict and left_out:
        raise DataError(f"{left_out[0].where}: {left_out[0].reason}, and {len(left_out) - 1:,} more pairs do not fit")
    found = DataRecord((text.source, text.target), len(train), len(val), _digest(train, val), "")
    record = began_with(found, plan.settings.data, plan.settings.init)
    refuse_other_data(plan.folder, record)
    refuse_other_start(plan.folder, record)
    records = [replace(each, place=None) for each in processes.gather(record)]  # it may be mounted elsewhere
    if others := [rank for rank, each in enumerate(records) if each != records[0]]:
        raise DataError(f"rank {others[0]} of {len(records)} sees another text in {plan.settings.data} than rank 0")
    return Corpus(vocabulary, train, val, record, left_out)


def _vocabulary(plan: TextPlan) -> Vocabulary:
    """The one in the run's folder; that of --init; else one that is learned."""
    folder, init = plan.folder, plan.settings.init
    known = read_config(folder).get("vocabulary") if (folder / "config.json").is_file() else None
    if (folder / VOCABULARY).is_file():
        return read_vocabulary(folder, known)
    if init:
        return read_translation_files(Path(init)).vocabulary
    learned = learn_vocabulary(plan.text.train, plan.recipe.text.vocabulary)
    if known and hashlib.sha256(learned.to_bytes()).hexdigest() != known:
        raise CheckpointError(
            f"{folder / VOCABULARY} is lost, and the text has changed since it was learned. Restore the file, "
            "or give a new folder with --out."
        )
    return learned


def _from_main(processes: Processes, make: Callable[[], Vocabulary]) -> Vocabulary:
    """Made by rank 0 alone; where it fails, all ranks fail alike."""
    made: Vocabulary | PatchloomError | None = None
    if processes.is_main:
        try:
            made = make()
        except PatchloomError as error:
            made = error
    made = processes.from_main(made)
    if isinstance(made, PatchloomError):
        raise made
    assert made is not None
    return made


def _digest(*parts: EncodedPairs) -> str:
    digest = hashlib.sha256()
    for pairs in parts:
        for side in (pairs.source, pairs.target):
            digest.update(side.subwords.data)
            digest.update(side.starts.data)
    return digest.hexdigest()


def _corpus_lines(plan: TextPlan, corpus: Corpus, run: Run, *, dry_run: bool) -> Iterator[str]:
    if corpus.left_out:
        first = corpus.left_out[0]
        listed = "" if dry_run else f"; all in {plan.folder / LEFT_OUT}"
        yield f"left out   {len(corpus.left_out):,} pairs of train, first {first.where}: {first.reason}{listed}"
    if corpus.val.left_out:
        first = corpus.val.left_out[0]
        told = f"{len(corpus.val.left_out):,} pairs of val have no loss"
        yield f"           note: {told}, first {first.where}: {first.reason}"
    for note in changes_since(plan.folder, corpus.record):
        yield f"           note: {note}"
    count = sum(p.numel() for p in run.model.parameters())
    note = f" ({corpus.vocabulary.note})" if corpus.vocabulary.note else ""
    yield f"model      {plan.recipe.model.name}: {human(count)} parameters, {len(corpus.vocabulary):,} subwords{note}"
    if run.accumulate > 1:
        why = "" if plan.settings.micro_batches else " does not fit in memory;"
        yield f"           the batch{why or ':'} using {run.accumulate} micro-batches, same result"


# The objects of the run -----------------------------------------------------------------------------------------------


class ValEvaluator:
    """Loss and perplexity of val, BLEU and exact matches of some greedy translations; every rank does all of it."""

    metric = "loss"

    def __init__(self, plan: TextPlan, corpus: Corpus) -> None:
        text, recipe = plan.text, plan.recipe
        tokens = max(recipe.optim.batch_size, recipe.text.max_length)  # val may have the longest sentence
        self._batches = TokenLoader(corpus.val, tokens=tokens, shuffle=False)
        self._sources, self._references = map(list, zip(*islice(text.val, GREEDY_SENTENCES), strict=True))
        self._corpus, self._languages = corpus, (text.source, text.target)

    def __call__(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        """(name, value) pairs, as the engine wants them."""
        network: Any = unwrap(model)
        yield from ((name, value) for name, value in token_loss(network, self._batches.epoch(0)) if name != "tokens")
        longest = self._corpus.train.longest[0]
        translator = Translator(network, self._corpus.vocabulary, languages=self._languages, longest=longest)
        found = [best.text for best, *_ in translator.translate(self._sources, beams=1)]
        scores = translation_scores(found, self._references, self._languages[1])
        yield "bleu_greedy", scores.bleu
        yield "exact_greedy", scores.exact


def make_translation_run(plan: TextPlan, corpus: Corpus, processes: Processes) -> Run:
    """Network, loaders, optimiser and what judges the network."""
    recipe, settings = plan.recipe, plan.settings
    torch.manual_seed(recipe.seed)
    if processes.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    network = make_seq2seq(recipe, len(corpus.vocabulary))
    if settings.init:
        _initialise(network, Path(settings.init), corpus.vocabulary)
    network.to(processes.device)
    torch.manual_seed(recipe.seed + processes.rank)  # the same weights on every rank, other dropout
    loader = TokenLoader(
        corpus.train,
        tokens=recipe.optim.batch_size,
        seed=recipe.seed,
        rank=processes.rank,
        world=processes.world,
        pin=processes.device.type == "cuda",
    )
    schedule = Schedule(recipe.optim, recipe.schedule, loader.steps_per_epoch)
    averaged = recipe.text.averaged_epochs
    # Every length is a shape of its own, so it is compiled once for all.
    model: nn.Module = torch.compile(network, dynamic=True) if settings.compiled else network  # type: ignore[assignment]
    evaluator = ValEvaluator(plan, corpus)
    run = Run(
        model=model,
        objective=Translation(recipe.objective.smoothing),
        optimizer=make_optimizer(network, recipe.optim),
        schedule=schedule,
        loader=loader,
        processes=processes,
        saver=Folder(plan.folder),
        average=EpochAverage(network, averaged, loader.steps_per_epoch) if averaged > 1 else None,
        clip_norm=recipe.optim.clip_norm,
        clip_each=recipe.optim.clip_each,
        evaluators=[evaluator],
        evaluate_every=max(1, recipe.schedule.epochs // EVALUATIONS),
        metric=evaluator.metric,
        lower_is_better=True,
        patience=settings.patience,
        unit="pairs",
    )
    run.accumulate = micro_batches(run, settings.micro_batches)
    return run


def _initialise(network: Seq2Seq, init: Path, vocabulary: Vocabulary) -> None:
    """Start from a run's weights, which belong to its vocabulary."""
    source, files = load_seq2seq(init)
    if files.vocabulary != vocabulary:
        raise UsageError(f"{init} has another vocabulary than the run to resume; give a new folder with --out")
    load_weights(network, dict(source.state_dict()), f"--init {init}")


# Doing it -------------------------------------------------------------------------------------------------------------


def _train_and_report(
    plan: TextPlan,
    corpus: Corpus,
    run: Run,
    lock: Lock | None,
    time_limit_s: float | None,
    say: Callable[[str], None],
) -> Trained:
    processes, folder = run.processes, plan.folder
    network: Any = unwrap(run.model)
    found = find_checkpoint(folder, read_checkpoint)
    if found:
        found = with_best_weights(found, folder, processes)
        for note in found.notes:
            say(f"note: {note}")
        if not has_ended(found, run):
            say(f"resuming {folder} at step {found.snapshot.step} of {run.schedule.total_steps}")
    restore = guarded(run, lock, lambda: _write_files(plan, corpus, network))
    run.records = open_records(folder, is_main=processes.is_main, trackers=plan.settings.trackers, restore=restore)
    started = clock.perf_counter()
    try:
        with processes.ranks_watched():
            outcome = run_loop(replace(run, time_limit_s=time_limit_s), found.snapshot if found else None)
    except NumericalError as error:
        raise with_files(error, plan.text.train) from error
    seconds = clock.perf_counter() - started
    if said := restore():
        say(said)
    done = found is not None and has_ended(found, run)
    metrics = _report(plan, outcome, processes, None if done else seconds, say) if processes.is_main else {}
    return Trained(folder, outcome, metrics, len(corpus.left_out))


def _write_files(plan: TextPlan, corpus: Corpus, network: Seq2Seq) -> None:
    """What is known before the first step."""
    write_translation_files(
        plan.folder,
        network,
        plan.recipe,
        corpus.vocabulary,
        languages=(plan.text.source, plan.text.target),
        longest=corpus.train.longest,
    )
    write_record(plan.folder, corpus.record)
    write_left_out(plan.folder, [(each.where, each.reason) for each in corpus.left_out])


def _report(
    plan: TextPlan, outcome: Outcome, processes: Processes, seconds: float | None, say: Callable[[str], None]
) -> dict[str, float]:
    """Val by the best weights, with the recipe's search; the numbers, `val.json`, `run.json` and `report.html`.

    `seconds` is None where nothing was trained: what is written of an earlier end stays as it is.
    """
    folder, settings, best = plan.folder, plan.settings, outcome.progress
    network, files = load_seq2seq(folder)
    translator = Translator.of(network.to(processes.device), files)
    with processes.autocast():
        judged = evaluate_pairs(translator, plan.text.val)
    metrics = dict(judged)
    how = already_ended(outcome) if seconds is None else f"{outcome.ended} after {duration(seconds)}"
    say(
        f"{how}: BLEU {metrics['bleu']:.2f}, chrF {metrics['chrf']:.2f}, "
        f"{metrics['exact']:.1f} % exact ({best.best_weights or 'model'}, step {best.best_step})"
    )
    say(f"           {judged.scores.signature}")
    record = RunRecord(
        data=settings.data,
        data_name=f"{plan.text.name}, {plan.text.source} → {plan.text.target}",
        init=settings.init,
        ended=outcome.ended,
        epochs=best.epoch,
        seconds=seconds or 0.0,
        best_weights=best.best_weights or "model",
        machine=machine_of(processes),
        versions=installed_versions(),
        choices={choice.key: choice.why for choice in plan.choices},
        notes=list(plan.text.notes),
    )
    with disk_errors(folder / "report.html"):
        keep_val(folder, judged)
        if seconds is not None or not (folder / RUN_RECORD).is_file():
            write_run_record(folder, record)
        say(f"{report_translation(folder)}")
    run, text = shlex.quote(str(folder)), shlex.quote(settings.data)
    say(f"Next: patchloom translate {run} < source.txt   |   patchloom evaluate {run} --text {text}")
    return metrics
