"""`patchloom.train`: the options of a training as an editor shows them; a test holds them equal to TrainingSettings."""

from collections.abc import Sequence
from typing import Any, Literal

from patchloom.data.batches.loader import WORKER_TIMEOUT_S
from patchloom.data.sources.specs import Spec, join_specs, split_specs
from patchloom.recipes.schema import Recipe
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import TrainingResult, run_training
from patchloom_runtime.errors import with_near_options


@with_near_options
def train(
    data: Spec | Sequence[Spec],
    *,
    model: str | None = None,
    recipe: str | Recipe = "auto",
    task: str | None = None,
    out: str | None = None,
    teacher: str | None = None,
    init: str | None = None,
    epochs: int | None = None,
    size: int | None = None,
    batch: int | None = None,
    micro_batches: int | None = None,
    fit: bool = False,
    time: str | None = None,
    stop_after: str | None = None,
    patience: int | None = None,
    pictures: int | None = None,
    changes: dict[str, Any] | None = None,
    device: str = "auto",
    workers: int | None = None,
    worker_timeout: float = WORKER_TIMEOUT_S,
    compiled: bool | None = None,
    shard: bool = False,
    level: str | None = None,
    labels: str | None = None,
    label_column: str | None = None,
    label_pattern: str | None = None,
    taxonomy: str | None = None,
    classes: Literal["innermost", "outermost"] | None = None,
    images: str | None = None,
    masks: str | None = None,
    boxes: str | None = None,
    ignore: int | None = None,
    names: str | None = None,
    without: str | None = None,
    val: Literal["held-out", "test"] | None = None,
    strict: bool = False,
    trackers: tuple[str, ...] = (),
) -> TrainingResult:
    """Train a classifier or a translator, as `patchloom train` does; the same call again resumes.

    What is learned
        data            folder of class folders, labels file, parquet, archive, 'digits', 'hf:user/name' …, or several
        model           network (`patchloom.list_models()`); chosen by the data when left out
        recipe          a published recipe (`patchloom.list_recipes()`), a recipe.yaml, a `Recipe`, or 'auto'
        task            'classify', 'segment' or 'detect'; as the recipe or the data say when left out
        teacher         distil from a run, 'timm:NAME', 'torchvision:NAME' …
        init            start from a run, from published weights ('in1k', 'resmlp_s12:in1k') or from a file
        epochs          passes over the data
        size            image size in pixels
        batch           images per update, over all devices; of text, tokens
        micro_batches   parts that a batch is cut into; as many as the memory asks for when left out
        fit             fit a named recipe to the data and the machine
        time            plan the whole schedule into '30m', '2h', '90s' …
        changes         recipe fields to change: {"augment.mixup": 0}

    The data
        level           label level to train on, where the data have several
        labels          CSV with path,label for a folder of images
        label_column    the column of that file that holds the classes
        label_pattern   the class as a part of the file's name: '{label}_*.jpg'
        taxonomy        file of levels above the classes
        classes         which of nested folders are the classes: 'innermost' or 'outermost'
        images          folder of the images, below the data; alone, it is read by classes
        masks           folder of their masks; '{split}annot' names one per split
        boxes           folder of their boxes (VOC, YOLO, LabelMe), or a file (COCO, CVAT, csv)
        ignore          value in masks that is not labelled
        names           file of names for the numbers of classes
        without         list of training images to leave out, such as `check A --against B` writes
        val             'held-out' validates on images of train and keeps the data's own val, or test, unseen; 'test'
                        validates on the test images, as published CIFAR results do
        strict          unreadable images and stray classes are errors

    The run
        out             its folder; runs/NAME-OF-DATA when left out
        stop_after      stop and save after '30m', '2h', '90s' …
        patience        stop after this many evaluations without improvement
        pictures        draw the network into RUN/pictures every so many epochs
        trackers        also log to 'tensorboard' or 'wandb'

    The machine
        device          'cpu', 'cuda', 'cuda:1'; 'auto' takes a GPU if there is one
        workers         processes that prepare images
        worker_timeout  seconds after which a silent one counts as hung
        compiled        torch.compile; by default where it pays
        shard           split weights and optimiser over the processes (FSDP)
    """
    given = locals()
    return run_training(TrainingSettings(**given | {"data": join_specs(split_specs(data)), "changes": changes or {}}))
