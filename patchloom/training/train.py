"""`patchloom.train`: the settings of a training run as keywords. A test holds them equal to `TrainingSettings`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from patchloom.data.batches.loader import WORKER_TIMEOUT_S
from patchloom.data.sources.specs import Data, split_specs
from patchloom.options import renamed
from patchloom.plugins import register_module
from patchloom.recipes.schema import Recipe
from patchloom.tasks.settings import TrainingSettings
from patchloom.training.run import TrainingResult, run_training
from patchloom_runtime.errors import with_near_options


@renamed(changes="set", without="exclude", compiled="compile", trackers="log")
@with_near_options
def train(
    data: Data,
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    recipe: str | Recipe = "auto",
    epochs: int | None = None,
    time: str | None = None,
    size: int | None = None,
    init: str | None = "auto",
    labels: str | None = None,
    out: str | None = None,
    device: str = "auto",
    task: str | None = None,
    teacher: str | None = None,
    batch: int | None = None,
    fit: bool = False,
    set: dict[str, Any] | None = None,  # noqa: A002
    race: bool = True,
    stop_after: str | None = None,
    folds: int | None = None,
    patience: int | None = None,
    select: str | None = None,
    max_error: float | str | None = None,
    negatives: tuple[str, ...] = (),
    pictures: int | None = None,
    preview: bool = False,
    log: tuple[str, ...] = (),
    micro_batches: int | None = None,
    workers: int | None = None,
    worker_timeout: float = WORKER_TIMEOUT_S,
    compile: bool | None = None,  # noqa: A002
    shard: bool = False,
    level: str | None = None,
    strict: bool = False,
    label_column: str | None = None,
    label_pattern: str | None = None,
    taxonomy: str | None = None,
    classes: Literal["innermost", "outermost"] | None = None,
    images: str | None = None,
    masks: str | None = None,
    boxes: str | None = None,
    ignore: int | None = None,
    names: str | None = None,
    exclude: str | None = None,
    corrections: str | None = None,
    val: str | None = None,
    transform: Callable[..., Any] | None = None,
    batch_transform: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, Any] | Sequence[Any] | Callable[..., Any] | None = None,
    callbacks: Sequence[Any] = (),
    optimizer: Callable[..., Any] | None = None,
    dry_run: bool = False,
) -> TrainingResult:
    """Train a model, as `patchloom train` does. The same call again resumes.

    Model and recipe
        data            folder of class folders, labels file, parquet, archive, 'digits', 'hf:user/name' …, or several;
                        or a Dataset, (images, targets), a list of (image, target), a table, a dict of splits
        model           network (`patchloom.list_models()`); chosen for the data by default
        recipe          published recipe (`patchloom.list_recipes()`), a recipe.yaml, a `Recipe`, or 'auto'
        task            'classify', 'multilabel', 'regress', 'segment' or 'detect'; as the recipe or the data by default
        teacher         distill from a run, 'timm:NAME', 'torchvision:NAME' …
        init            start from a run, published weights ('in1k', 'resmlp_s12:in1k') or a file; 'none': random;
                        'auto': published weights that were downloaded before, if any
        epochs          passes over the data
        size            image size in pixels
        batch           images per update over all devices (translation: tokens)
        fit             fit a named recipe to the data and this machine
        time            fit the whole run into '30m', '2h', '90s' …
        set             recipe fields to change: {"augment.mixup": 0}
        race            let candidates of the automatic recipe race for a fifth of the time, on training images

    Data
        level           label level to train on, if the data have several
        labels          table with the columns path and label, for a folder of images
        label_column    column of the labels file that holds the classes
        label_pattern   class as a part of the file name: '{label}_*.jpg'
        taxonomy        file of levels above the classes
        classes         which of nested folders are the classes: 'innermost' or 'outermost'
        images          image folder below the data; alone, it is read by class folders
        masks           mask folder; '{split}annot' names one per split
        boxes           folder of boxes (VOC, YOLO, LabelMe), or a file (COCO, CVAT, csv)
        ignore          mask value that means unlabeled
        names           file of class names for numbered classes
        exclude         list of training images to exclude, as `check A --against B` writes it
        corrections     labels to change and images to drop, as the page of `audit` writes them
        val             'held-out' validates on images of train and keeps the data's own val, or test, unseen; '2/5' on
                        fold 2 of 5 of train; 'test' on the test images, as published CIFAR results do
        strict          treat warnings about the data as errors: unreadable images, stray classes

    Your own parts (docs/plugins.md)
        model           an `nn.Module`, or a function of `num_classes` and `image_size` that returns one
        transform       function of one training image, in place of the recipe's crop, flip and colors
        batch_transform function of a batch of images, or of images and targets
        loss            function (outputs, targets) → scalar tensor
        metrics         functions (outputs, targets) → float of all val images, by name or as a list
        callbacks       objects with `on_step`, `on_epoch`, `on_evaluation`, `on_end` (`patchloom.Callback`)
        optimizer       function of the trainable parameters that returns a `torch.optim.Optimizer`

    Run
        out             run folder; runs/NAME-OF-DATA by default
        stop_after      stop and save after '30m', '2h', '90s' …
        folds           cross-validate with K runs, each validated on another part of train; returns a `FoldsResult`
        patience        stop after this many evaluations without improvement
        select          metric of val that selects the best weights; top1 by default
        max_error       answer only where at most this share of the answers is wrong, 0.05 or '5%' (`calibrate`)
        negatives       classes that mean none of these
        pictures        draw the network into RUN/pictures every so many epochs
        preview         draw crops and augmented training images before the first step
        log             also log to 'tensorboard', 'wandb', 'mlflow' or 'trackio'
        dry_run         plan and measure a few steps; train nothing

    Hardware
        device          'cpu', 'cuda' or 'cuda:1'; 'auto' uses a GPU if there is one
        micro_batches   micro-batches per batch; as many as the memory requires by default
        workers         processes that read images
        worker_timeout  seconds without a batch after which a worker counts as hung
        compile         use torch.compile; by default where it pays off
        shard           shard weights and optimizer state over the processes (FSDP)
    """
    options = dict(locals())
    if model is not None and not isinstance(model, str):
        options["model"] = register_module(model)
    dry_run = options.pop("dry_run")
    options |= {"changes": options.pop("set") or {}, "compiled": options.pop("compile"), "trackers": options.pop("log")}
    return start_training(TrainingSettings(**options | {"data": tuple(split_specs(data))}), dry_run=dry_run)


def start_training(
    settings: TrainingSettings,
    *,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
    started: float | None = None,
    ask: Callable[[str], bool] | None = None,
) -> TrainingResult:
    """Train one run, or one per fold with --folds, which asks nothing. The other options are those of a run."""
    if settings.folds is not None:
        from patchloom.training.sweeps.folds import train_folds  # a single run starts without it

        return train_folds(settings, dry_run=dry_run, say=say)
    return run_training(settings, dry_run=dry_run, say=say, started=started, ask=ask)
