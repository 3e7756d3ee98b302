"""The race of `auto`: held-out training images decide, the file keeps it, and a killed race goes on."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchloom.engine.loop import train as run_loop
from patchloom.recipes.candidates import Candidate, narrowed
from patchloom.runs.checkpoints import find_checkpoint, read_checkpoint
from patchloom.runs.race import FILE, Race, RaceCandidate, Trial, read_race, write_race
from patchloom.tasks.images.plan import ImagePlanner
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.segmentation.training import SegmentationPlanner
from patchloom.tasks.verify import verify
from patchloom.training import race
from patchloom.training.race import candidates_of, ranked, rounded_steps, standard_error
from patchloom.training.run import make_plan, run_training
from patchloom_runtime.errors import CheckpointError

SHAPES = "shapes:count=300,size=16"
TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
ROWS = [
    Candidate("plain", {}),
    Candidate("large steps", {"optim.lr": 0.03}),
    Candidate("unmixed", {"augment.mixup": 0.0, "augment.policy": "none"}),
]


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Train with a short race of three candidates; the steps do not depend on the clock."""
    monkeypatch.setattr(ImagePlanner, "candidate_rows", lambda *_: ROWS)
    monkeypatch.setattr(race, "LEAST_TIME_S", 0.0)
    monkeypatch.setattr(race, "LEAST_TRIAL_S", 0.01)
    monkeypatch.setattr(race, "MEASURING_SHARE", 0.0)
    monkeypatch.setattr(race, "OVERRUN", math.inf)
    monkeypatch.setattr(race, "rounded_steps", lambda _: 8)
    monkeypatch.setattr("patchloom.training.timing.LONGEST_EPOCHS", 2)
    monkeypatch.chdir(tmp_path)

    def train(lines: list[str] | None = None, **options: Any) -> Any:
        say = str if lines is None else lines.append
        return run_training(settings(**options), say=say)

    return train


def settings(**options: Any) -> TrainingSettings:
    own: dict[str, Any] = {"device": "cpu", "workers": 0, "time": "10m", "out": "run", "changes": TINY}
    return TrainingSettings(**{"data": (SHAPES,)} | own | options)


def test_the_winner_is_trained_and_its_race_is_kept(raced: Callable[..., Any], tmp_path: Path) -> None:
    lines: list[str] = []
    run = raced(lines)
    kept = read_race(run.folder)
    assert kept is not None
    assert [row.name for row in kept.candidates] == ["plain", "large steps", "unmixed"]
    assert {(trial.round, trial.name) for trial in kept.trials} >= {(0, row.name) for row in ROWS}
    assert sum(trial.round == 1 for trial in kept.trials) == 2
    assert (kept.held_out, kept.train) == (64, 236)
    winner = next(row for row in ROWS if row.name == kept.winner)
    recipe = make_plan(settings(), "cpu").recipe  # of the resumed run
    for key, value in winner.changes.items():
        part, name = key.split(".")
        assert getattr(getattr(recipe, part), name) == value
    for row in ROWS:
        assert any(line.split()[: len(row.name.split())] == row.name.split() for line in lines)
    report = (run.folder / "report.html").read_text()
    assert all(row.name in report for row in ROWS)
    checked = verify(run.folder)
    assert FILE in checked.checked
    assert checked.wrong == {}
    again: list[str] = []
    assert raced(again).folder == run.folder
    assert not any(line.startswith("race") for line in again)


def test_val_and_test_are_not_read(raced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(settings(), "cpu")
    trial = plan.task.training.held_out(plan, 0.2)
    rows = {split: set(getattr(part.splits, split).rows) for part in (plan,) for split in ("train", "val")}
    assert set(trial.splits.train.rows) | set(trial.splits.val.rows) == rows["train"]
    assert not set(trial.splits.train.rows) & set(trial.splits.val.rows)
    assert not set(trial.splits.val.rows) & rows["val"]
    assert trial.splits.test is None


@pytest.mark.parametrize("after", [2, 4])  # in the first and in the second round
def test_a_killed_race_repeats_no_trial_and_picks_the_same(
    raced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole = raced(out="whole")
    trials = 0
    original = race.trial_score

    def killed(*arguments: Any) -> Any:
        nonlocal trials
        if trials == after:
            raise KeyboardInterrupt
        trials += 1
        return original(*arguments)

    monkeypatch.setattr(race, "trial_score", killed)
    with pytest.raises(KeyboardInterrupt):
        raced(out="run")
    half = read_race(Path("run"))
    assert half is not None
    assert (len(half.trials), half.winner) == (after, "")
    trials = -100
    raced(out="run")
    ended = read_race(Path("run"))
    full = read_race(whole.folder)
    assert ended is not None
    assert full is not None
    assert trials == -100 + len(full.trials) - after
    assert ended.trials[:after] == half.trials
    assert [(trial.name, trial.score) for trial in ended.trials] == [(trial.name, trial.score) for trial in full.trials]
    assert ended.winner == full.winner


def test_without_a_time_the_winner_gets_the_epochs_that_fit(raced: Callable[..., Any]) -> None:
    """The run is then a plain one: interrupted and resumed it gives the same weights."""
    first = raced(time=None, out="a")
    kept = read_race(first.folder)
    assert kept is not None
    plan = make_plan(settings(time=None, out="a"), "cpu")
    assert plan.recipe.schedule.epochs == kept.row(kept.winner).epochs
    lines: list[str] = []
    raced(lines, time=None, out="a")
    assert any("already finished" in line for line in lines)


def test_rows_for_shorter_runs_take_no_place(raced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ROWS[0], ROWS[2]._replace(most_epochs=1), ROWS[1]]
    monkeypatch.setattr(ImagePlanner, "candidate_rows", lambda *_: rows)
    monkeypatch.setattr(race, "LEAST_TRIAL_S", 1e6)  # two candidates
    run = raced()
    state = read_race(run.folder)
    assert state is not None
    assert [row.name for row in state.candidates] == ["plain", "large steps"]


def test_a_raced_run_resumes_exactly(raced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a").mkdir()
    Path("b").mkdir()
    monkeypatch.setattr(race.StepTimes, "total_s", lambda *_: 2.0)
    monkeypatch.setattr(race, "epochs_within", lambda *_, **__: 3)
    raced(time=None, out="a")

    def stopped(run: Any, snapshot: Any = None) -> Any:
        return run_loop(run if snapshot else _limited(run), snapshot)

    monkeypatch.setattr("patchloom.training.run.run_loop", stopped)
    assert raced(time=None, out="b").outcome.ended == "time limit"
    assert raced(time=None, out="b").outcome.ended == "finished"
    # The newest weights: stopping adds an evaluation, which may select other best weights.
    one, other = (find_checkpoint(Path(folder), read_checkpoint).snapshot for folder in ("a", "b"))
    assert one.step == other.step
    assert all(bool((each == other.tensors["weights"][name]).all()) for name, each in one.tensors["weights"].items())


def _limited(run: Any) -> Any:
    run.time_limit_s = 0.0
    return run


def test_masks_are_raced_over_as_well(raced: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentationPlanner, "candidate_rows", lambda *_: ROWS[:2])
    small = {"segment.channels": 8, "model.options.dim": 8, "model.options.depths": (1, 1, 1, 1)}
    run = raced(data=("shapes:count=260,size=32",), task="segment", changes=small)
    kept = read_race(run.folder)
    assert kept is not None
    assert kept.metric == "miou"
    assert [(trial.round, trial.name) for trial in kept.trials] == [(0, "plain"), (0, "large steps")]
    assert kept.winner


def test_which_runs_have_a_race(raced: Callable[..., Any]) -> None:
    def names(**options: Any) -> list[str]:
        return [row.name for row in candidates_of(make_plan(settings(**options), "cpu"))]

    assert names() == [row.name for row in ROWS]
    plugged = {"callbacks": (SimpleNamespace(on_end=print),)}
    for options in ({"race": False}, {"recipe": "small_images"}, {"epochs": 3, "time": None}, plugged):
        assert names(**options) == []
    assert names(changes=TINY | {"optim.lr": 0.01}) == ["plain", "unmixed"]
    augment = {"augment.mixup": 0.1, "augment.policy": "none", "optim.lr": 0.01}
    assert names(changes=TINY | augment) == []
    few = TrainingSettings(data=("shapes:count=100,size=16",), device="cpu", out="few", time="6s")
    assert candidates_of(make_plan(few, "cpu")) == ()


def test_a_run_without_a_race_does_not_follow_an_old_one(raced: Callable[..., Any]) -> None:
    Path("run").mkdir()
    write_race(Path("run"), Race("other", 10, 5, "top1", [RaceCandidate("a", {"optim.lr": 7.0}, 1, [8])], [], "a"))
    raced(race=False, time=None, epochs=1)
    assert make_plan(settings(race=False, time=None, epochs=1), "cpu").recipe.optim.lr != 7.0
    assert not Path("run", FILE).exists()


def test_a_dry_run_only_names_the_candidates(raced: Callable[..., Any]) -> None:
    lines: list[str] = []
    run_training(settings(), dry_run=True, say=lines.append)
    (line,) = [line for line in lines if line.startswith("race")]
    assert all(row.name in line for row in ROWS)
    assert not Path("run").exists()


def test_options_remove_a_dimension() -> None:
    rows = [Candidate("a", {}), Candidate("b", {"model.name": "x", "optim.lr": 1}), Candidate("c", {"optim.lr": 1})]
    assert [row.name for row in narrowed(rows, ())] == ["a", "b", "c"]
    assert narrowed(rows, ("model.",)) == [rows[0], Candidate("b", {"optim.lr": 1})]
    assert narrowed(rows, ("model.", "optim.lr")) == [rows[0]]


def of_scores(scores: dict[str, float | None], **more: Any) -> Race:
    rows = [RaceCandidate(name, {}, 1, [8]) for name in scores]
    trials = [Trial(0, name, 8, score, None, 1.0) for name, score in scores.items()]
    return Race("key", 400, 100, "top1", rows, trials, **more)


def test_scores_within_one_standard_error_are_equal() -> None:
    assert standard_error(50.0, 100) == pytest.approx(5.0)
    assert standard_error(0.0, 100) == 0.0
    assert ranked(of_scores({"a": 46.0, "b": 50.0}), 0) == ["a", "b"]
    assert ranked(of_scores({"a": 44.0, "b": 50.0}), 0) == ["b", "a"]
    assert ranked(of_scores({"a": 44.0, "b": None, "c": 60.0}), 0) == ["c", "a"]
    assert ranked(of_scores({"a": 2.0, "b": 1.9}, lower_is_better=True), 0) == ["b", "a"]


@pytest.mark.parametrize(("steps", "rounded"), [(0.5, 0), (1, 1), (5.9, 4), (6, 6), (7.9, 6), (8, 8), (100, 96)])
def test_steps_are_rounded(steps: float, rounded: int) -> None:
    assert rounded_steps(steps) == rounded


@pytest.mark.parametrize(
    "change",
    [
        {"winner": "nobody"},
        {"trials": [{"round": 0}]},
        {"candidates": [{"name": "a"}]},
        {"candidates": 2 * [{"name": "a", "changes": {}, "epochs": 1, "steps": [8]}]},
        {"format": 99},
        {"key": math.inf},
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write_race(tmp_path, Race("key", 10, 5, "top1", [RaceCandidate("a", {}, 1, [8])], [], "a"))
    (tmp_path / "checksums.json").unlink()
    values = json.loads((tmp_path / FILE).read_text()) | change
    (tmp_path / FILE).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=FILE):
        read_race(tmp_path)
