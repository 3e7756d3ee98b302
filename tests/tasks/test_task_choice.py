"""Which task a training is of: the recipe, the user, or the data say it, and the plan says why."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from patchloom.data.labels.unlabeled import task_of_data
from patchloom.data.sources.source import find_source
from patchloom.tasks.plan import OpenedSettings, TrainingSettings
from patchloom.tasks.task_choice import choose_task
from patchloom_runtime.errors import UsageError
from tests.messages import missing, refused


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def parquet(path: Path, **columns: list) -> Path:
    picture = encoded(np.zeros((8, 8, 3), np.uint8))
    table = pa.table({"image": [picture] * 4, **columns})
    info = {"label_names": ["a", "b"]}
    pq.write_table(table.replace_schema_metadata({"dataset_info": json.dumps(info)}), path)
    return path


MASKS = [encoded(np.ones((8, 8), np.uint8))] * 4
BOXES = {"boxes": [[[0, 0, 4, 4]]] * 4, "labels": [[1]] * 4}


@pytest.mark.parametrize(
    ("columns", "word", "others"),
    [
        ({"label": [0, 1, 0, 1]}, "classify", ()),
        ({"mask": MASKS}, "segment", ()),
        (BOXES, "detect", ()),
        ({"label": [0, 1, 0, 1], "mask": MASKS}, "classify", ("--task segment",)),
    ],
)
def test_the_data_say_what_can_be_learned(columns: dict, word: str, others: tuple, tmp_path: Path) -> None:
    task, why = task_of_data(find_source(parquet(tmp_path / "a.parquet", **columns)))
    assert task == word
    assert missing(why, *others) == []
    assert others or "--task" not in why
    assert bool(why) == (list(columns) != ["label"])  # labels alone are no surprise


def test_shapes_are_classified_unless_asked_otherwise() -> None:
    task, settings = choose_task(TrainingSettings(data="shapes:count=20,size=16"))
    assert (task.name, settings.task) == ("classification", "classify")
    assert isinstance(settings, OpenedSettings)
    assert missing(settings.why_task, "--task segment", "detect") == []
    assert settings.source is not None


def test_a_word_that_is_no_task_names_the_nearest() -> None:
    with refused(UsageError, "--task", "classfy", "classify", "segment", "detect"):
        choose_task(TrainingSettings(data="digits", task="classfy"))


def test_a_recipe_of_another_task_is_refused_with_both() -> None:
    with refused(UsageError, "--task classify", "dino", "embedding"):
        choose_task(TrainingSettings(data="digits", recipe="dino", task="classify"))


def test_steps_become_the_nearest_epochs() -> None:
    from patchloom.recipes import get_recipe, override
    from patchloom.recipes.choices import changed_recipe, with_steps

    recipe = override(get_recipe("small_images"), {"schedule.steps": 160_000, "optim.batch_size": 16})
    longer, choices = with_steps(recipe, [], 20_210, {})
    assert longer.schedule.epochs == 127
    (choice,) = choices
    assert missing(choice.why, 160_000, 16, 20_210) == []
    given = {"schedule.epochs": 3}
    shorter, _ = changed_recipe(recipe, given)
    assert (with_steps(shorter, [], 20_210, given)[0].schedule.epochs, shorter.schedule.steps) == (3, 0)
