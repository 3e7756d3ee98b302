"""Time is planned from measured steps; a dry run answers whatever the recipe."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from patchloom.data.batches import decoded_dataset as device
from patchloom.engine import loop
from patchloom.runs.config import read_recipe
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.tasks.plan import TrainingSettings
from patchloom.training import timing
from patchloom.training.run import run_training
from patchloom.training.timing import REPORT_S, StepTimes, epochs_within, evaluations_of
from patchloom_runtime.errors import UsageError

TINY = {"model.options.depth": 2, "model.options.dim": 16, "model.options.patch_size": 4}
DATA = "shapes:count=60,size=32"


def settings(out: Path, **changes) -> TrainingSettings:
    values = {"data": DATA, "out": str(out), "batch": 16, "workers": 0, "device": "cpu", "changes": TINY}
    return TrainingSettings(**values | changes)


def test_epochs_that_fit_with_their_evaluations() -> None:
    measured = StepTimes(step_s=0.1, evaluation_s=1.0, decoding_s=2.0, on="5 steps", images_per_s=100.0)
    fits = {"longest": 300, "evaluations": 16}
    for seconds in (20, 60, 100, 1000):
        epochs = epochs_within(seconds, measured, 10, **fits)
        assert measured.seconds(epochs, 10, evaluations_of(epochs, 16)) <= seconds
        assert measured.seconds(epochs + 1, 10, evaluations_of(epochs + 1, 16)) > seconds or epochs == 300
    assert epochs_within(3, measured, 10, **fits) == 0
    assert epochs_within(1e6, measured, 10, **fits) == 300
    assert measured.seconds(10, 10, 10) == 10 + 2 + 11 + REPORT_S


@pytest.mark.parametrize(("epochs", "times"), [(1, 1), (6, 6), (16, 16), (31, 31), (32, 16), (33, 17), (100, 17)])
def test_evaluations_are_counted_as_the_loop_makes_them(epochs, times) -> None:
    every = max(1, epochs // 16)
    assert evaluations_of(epochs, 16) == times
    assert times == sum(epoch % every == 0 or epoch == epochs for epoch in range(1, epochs + 1))


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[Path, list[str], list[int]]:
    """A run planned into a time in which, by a pretended clock, seven epochs fit; what it said; images decoded."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    said: list[str] = []
    decoded: list[int] = []
    decode_all = device.decode_all

    def counted(dataset, *arguments, **options):
        decoded.append(len(dataset))
        return decode_all(dataset, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "measure", lambda *_, **__: StepTimes(1.0, 1.0, 0.0, "5 steps", 16.0))
        patch.setattr(device, "decode_all", counted)
        patch.setattr(timing.clock, "perf_counter", lambda: 0.0)
        # An epoch has 3 steps and an evaluation; then the report, which evaluates once more.
        run_training(settings(folder, time=f"{7 * 4 + 1 + REPORT_S}s"), say=said.append)
    return folder, said, decoded


def test_a_time_is_planned_into_epochs_and_auto_follows_them(planned) -> None:
    folder, said, _ = planned
    recipe = read_recipe(folder)
    assert recipe.schedule.epochs == 7
    assert (recipe.augment.mixup, recipe.augment.cutmix) == (0.0, 0.0)
    assert recipe.schedule.warmup_steps == 2
    (line,) = [line for line in said if "schedule.epochs = 7" in line]
    assert "33.0s" in line
    assert "16 images/s" in line
    assert read_run_metadata(folder).ended == "finished"


def test_planning_decodes_the_images_once(planned) -> None:
    _, _, decoded = planned
    assert decoded.count(60) == 1  # those to train on; others are evaluated


def test_the_same_command_reads_the_epochs_from_the_run(planned, monkeypatch) -> None:
    folder, _, _ = planned
    monkeypatch.setattr(timing, "measure", None)  # it would fail if it were asked
    said: list[str] = []
    again = run_training(settings(folder, time="10h"), say=said.append)
    assert again.outcome.ended == "finished"
    assert any("schedule.epochs = 7" in line and str(folder) in line for line in said)


def test_more_epochs_go_on_with_what_was_chosen_at_the_beginning(planned) -> None:
    folder, _, _ = planned
    said: list[str] = []
    longer = run_training(settings(folder, epochs=40), dry_run=True, say=said.append)
    assert longer.folder == folder
    assert any("augment.mixup = 0.0" in line for line in said)


def test_a_named_recipe_is_shortened_and_no_longer_than_published(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda *_, **__: StepTimes(1.0, 0.0, 0.0, "5 steps", 16.0))
    said: list[str] = []
    run_training(settings(tmp_path / "a", recipe="small_images", time="60s"), dry_run=True, say=said.append)
    (line,) = [line for line in said if "schedule.epochs =" in line]
    epochs = int(re.search(r"= (\d+)", line)[1])
    assert 10 <= epochs <= 18  # 60 s, less start and report, at 3 s per epoch
    assert any("schedule.warmup_epochs = 1 " in line for line in said)
    said.clear()
    run_training(settings(tmp_path / "a", recipe="small_images", time="9h"), dry_run=True, say=said.append)
    assert any("schedule.epochs = 220 " in line and "9h" in line for line in said)


def test_what_the_head_is_fitted_to_is_part_of_the_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda *_, **__: StepTimes(0.1, 0.0, 0.0, "5 steps", 1.0))
    epochs = []
    for fitted in (False, True):
        said: list[str] = []
        asked = settings(tmp_path / "a", time="60s", changes={"model.fit_head": fitted})
        run_training(asked, dry_run=True, say=said.append)
        (line,) = [line for line in said if "schedule.epochs =" in line]
        epochs.append(int(re.search(r"= (\d+)", line)[1]))
    assert epochs[1] < epochs[0]


@pytest.mark.parametrize(("device", "expected"), [("cuda", [0.01]), ("cpu", [30.0])])
def test_the_first_step_on_a_gpu_is_no_measure(device, expected, monkeypatch) -> None:
    """It may compile for longer than the time for measuring."""
    now, durations = [0.0], iter([30.0, *[0.01] * 100])
    monkeypatch.setattr(timing.clock, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "_whole_step", lambda *_: now.__setitem__(0, now[0] + next(durations)))
    loader = SimpleNamespace(epoch=lambda _: iter([torch.zeros(1)] * 10))
    processes = SimpleNamespace(device=SimpleNamespace(type=device), synchronize=lambda: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda batch, _: batch)
    run = SimpleNamespace(loader=loader, processes=processes, model=torch.nn.Identity())
    assert list(timing._whole_steps(run, budget_s=1.0)) == pytest.approx(expected)


def test_less_time_than_an_epoch_is_one_epoch_and_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda *_, **__: StepTimes(100.0, 1.0, 0.0, "4 images at a time", 0.2))
    said: list[str] = []
    run_training(settings(tmp_path / "a", time="60s"), dry_run=True, say=said.append)
    assert any("schedule.epochs = 1 " in line and "5:06" in line for line in said)


def test_a_run_that_is_much_too_slow_is_stopped_evaluated_and_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda *_, **__: StepTimes(1e-4, 0.0, 0.0, "5 steps", 1e6))
    monkeypatch.setattr(loop._Loop, "requests", lambda *_: loop.RankRequests(time_up=1))
    trained = run_training(settings(tmp_path / "run", time="20s"), say=str)
    assert trained.outcome.ended == "time limit"
    assert trained.metrics["top1"] >= 0
    assert (tmp_path / "run" / "report.html").exists()


def test_time_and_epochs_are_refused_together(tmp_path) -> None:
    for given in ({"epochs": 3}, {"changes": {"schedule.epochs": "3"}}):
        with pytest.raises(UsageError, match="--epochs") as error:
            run_training(settings(tmp_path / "run", time="2m", **given), say=str)
        assert "--time" in str(error.value)
    with pytest.raises(UsageError, match=r"--time.*'0s'"):
        run_training(settings(tmp_path / "run", time="0s"), say=str)
    with pytest.raises(UsageError, match="--stop-after"):
        run_training(settings(tmp_path / "run", stop_after="soon"), say=str)


def test_fit_is_for_named_recipes(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"--fit\b.*\bauto\b"):
        run_training(settings(tmp_path / "run", fit=True), say=str)


def test_stopping_after_a_time_saves_and_the_same_command_goes_on(tmp_path) -> None:
    short = settings(tmp_path / "run", recipe="small_images", epochs=2, stop_after="0.001s")
    assert run_training(short, say=str).outcome.ended == "time limit"
    whole = settings(tmp_path / "run", recipe="small_images", epochs=2)
    assert run_training(whole, say=str).outcome.ended == "finished"


def test_a_dry_run_of_long_steps_measures_a_few_images(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "MEASURING_S", 0.0)
    said: list[str] = []
    epochs = []
    whole = device.DeviceLoader.epoch
    monkeypatch.setattr(device.DeviceLoader, "epoch", lambda s, *a: epochs.append(s.plan.batch_size) or whole(s, *a))
    run_training(settings(tmp_path / "a", recipe="small_images", epochs=2), dry_run=True, say=said.append)
    (line,) = [line for line in said if re.match(r"time\b", line)]
    assert {"6", "4"} <= set(re.findall(r"\b\d+\b", line))
    assert max(epochs) == 4


def test_a_recipe_that_does_not_suit_the_data_says_so_and_is_fitted(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "MEASURING_S", 0.0)
    small = {"model": "timm:test_resnet", "batch": None, "changes": {}}
    said: list[str] = []
    data = "shapes:count=100,size=32"
    run_training(
        settings(tmp_path / "a", data=data, recipe="grafit_small_images", epochs=2, **small | {"batch": 80}),
        dry_run=True,
        say=said.append,
    )
    (note,) = [line for line in said if "note: " in line and "--fit" in line]
    for fact in ("grafit_small_images", "50,000", "2", "80", "1,000", "100", "schedule.epochs", "optim.batch_size"):
        assert re.search(rf"\b{re.escape(fact)}\b", note), fact
    said.clear()
    run_training(
        settings(tmp_path / "a", data=data, recipe="grafit", fit=True, epochs=2, **small),
        dry_run=True,
        say=said.append,
    )
    assert not any("--fit" in line for line in said)
    assert any(re.search(r"optim\.batch_size = 16 .*\b6\b.*\b0\b", line) for line in said)
    assert any("grafit.target_decay = 0.97" in line for line in said)


def test_a_run_of_days_is_said_before_it_begins(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "seconds_per_image", lambda _: 3600.0)
    said: list[str] = []
    run_training(settings(tmp_path / "a", recipe="small_images", epochs=1), say=said.append)
    assert any(all(fact in line for fact in ("note: ", "2.0 days", "--fit", "--time 8h")) for line in said)


@pytest.mark.parametrize(("given", "is_said"), [({}, True), ({"time": "10m"}, False)])
def test_a_run_of_minutes_says_so_unless_its_time_is_given(given, is_said, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "seconds_per_image", lambda _: 10.0)
    monkeypatch.setattr(timing, "LONGEST_EPOCHS", 1)
    said: list[str] = []
    run_training(settings(tmp_path / "a", **(given or {"epochs": 1})), say=said.append)
    assert any(line.startswith("time ") and "--time 10m" in line for line in said) == is_said
