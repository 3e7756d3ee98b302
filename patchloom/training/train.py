"""`patchloom.train`: the settings of a training run as keywords. A test holds them equal to `TrainingSettings`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from patchloom.data.batches.loader import WORKER_TIMEOUT_S
from patchloom.data.sources.specs import Data, is_url, split_specs
from patchloom.options import renamed
from patchloom.plugins import register_module
from patchloom.recipes.schema import Recipe
from patchloom.tasks.settings import TrainingSettings
from patchloom.training.run import TrainingResult, run_training
from patchloom.training.sweeps.folds import train_folds
from patchloom_runtime.errors import UsageError, with_near_options


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
        data             Folders of class folders, zip, tar, parquet, a labels file, 'digits', 'hf:user/name' … Also a
                         Dataset, (images, targets), a list of (image, target), a table, or a dict of splits.
        model            Network (see `patchloom models`). Default: chosen for the data. Names:
                         `patchloom.list_models()`.
        recipe           Published recipe (see `patchloom recipes`), a recipe.yaml, or 'auto'. Or a `Recipe`.
        task             Task to train, if the data allow several. Default: that of the recipe or the data. One of
                         'classify', 'multilabel', 'regress', 'segment' and 'detect'.
        teacher          Distill from a run, 'timm:NAME', 'torchvision:NAME' …
        init             Start from a run, published weights ('in1k', 'resmlp_s12:in1k') or a file; 'none': random;
                         'auto': downloaded weights, if any.
        epochs           Passes over the data. Default: the recipe's.
        size             Image size in pixels. Default: the recipe's.
        batch            Images per update over all devices (translation: tokens).
        fit              Fit a named recipe to the data and this machine.
        time             Fit the whole run into 90s, 30m, 2h …, planned from a few measured steps.
        set              Recipe fields to change: augment.mixup=0. As a dict: {"augment.mixup": 0}.
        race             Let candidates of the automatic recipe race for a fifth of the time, on training images.

    Data
        level            Label level to train on, if the data have several.
        labels           Table with the columns path and label, for a folder of images.
        label_column     Column of the labels file that holds the classes.
        label_pattern    Class as a part of the file name: '{label}_*.jpg'.
        taxonomy         File of levels above the classes (csv, json, yaml), or imagenet127.
        classes          Which of nested folders are the classes. 'innermost' or 'outermost'.
        images           Image folder below DATA; alone, it is read by class folders.
        masks            Mask folder; '{split}annot' names one per split.
        boxes            Folder of boxes (VOC, YOLO, LabelMe), or a file (COCO, CVAT, csv).
        ignore           Mask value that means unlabeled.
        names            File of class names, one per line, or YOLO's yaml, for numbered classes.
        exclude          List of training images to exclude, as `check A --against B` writes it.
        corrections      Labels to change and images to drop, as the page of `audit` writes them.
        val              Validate on images held out of train (default without a val split), on fold 2 of 5 of train, or
                         on test. Values: 'held-out', '2/5' or 'test'. The first two keep the data's own val, or test,
                         unseen; published CIFAR results are validated on test.
        strict           Treat warnings about the data as errors: unreadable images, stray classes.

    Your own parts (docs/plugins.md)
        model            An `nn.Module`, or a function of `num_classes` and `image_size` that returns one.
        transform        Function of one training image, in place of the recipe's crop, flip and colors.
        batch_transform  Function of a batch of images, or of images and targets.
        loss             Function (outputs, targets) → scalar tensor.
        metrics          Functions (outputs, targets) → float of all val images, by name or as a list.
        callbacks        Objects with `on_step`, `on_epoch`, `on_evaluation`, `on_end` (`patchloom.Callback`).
        optimizer        Function of the trainable parameters that returns a `torch.optim.Optimizer`.

    Run
        out              Run folder. Default: runs/NAME-OF-DATA.
        stop_after       Stop and save after 30m, 2h …; the same command resumes.
        folds            Cross-validate: K runs, each validated on another part of train. Returns a `FoldsResult`.
        patience         Stop after N evaluations without improvement.
        select           Metric of val that selects the best weights. Default: top1.
        max_error        Abstain from unsure predictions, so that at most this share of the others is wrong: 5%, 0.05.
        negatives        Classes that mean none of these.
        pictures         Draw the network into RUN/pictures every N epochs.
        preview          Draw crops and augmented training images before the first step.
        log              Also log to 'tensorboard', 'wandb', 'mlflow' or 'trackio'.
        dry_run          Print the plan, the memory and the time from a few steps; train nothing.

    Hardware
        device           'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
        micro_batches    Split each batch into N micro-batches. Default: as the memory requires.
        workers          Processes that read images.
        worker_timeout   Seconds without a batch after which a worker counts as hung.
        compile          Use torch.compile. Default: where it pays off.
        shard            Shard weights and optimizer state over the processes (FSDP).
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
    if settings.folds is not None and is_url(settings.out):
        raise UsageError("--folds writes several runs and a table; pass a local folder as --out")
    if settings.folds is not None:
        return train_folds(settings, dry_run=dry_run, say=say)
    return run_training(settings, dry_run=dry_run, say=say, started=started, ask=ask)
