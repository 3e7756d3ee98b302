"""Settings of a training run.

The command line builds the options of `patchloom train` from this class before torch is loaded, so it imports little.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from patchloom.data.reading_options import Reading
from patchloom.data.sources.specs import join_specs, split_specs
from patchloom.options import DATA, HARDWARE, MODEL, RUN, Argument, Option

if TYPE_CHECKING:
    from patchloom.recipes.schema import Recipe
else:
    Recipe = Any  # `patchloom --help` does not load recipes


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings for one training run. Only `data` has no default.

    The fields from `labels` to `val` that say how the data are read take their help from `Reading`.
    """

    data: Annotated[
        tuple[str, ...],
        Argument(
            "Folders of class folders, zip, tar, parquet, a labels file, 'digits', 'hf:user/name' …",
            metavar="DATA",
        ),
    ]
    model: Annotated[
        str | None, Option("Network (see `patchloom models`). Default: chosen for the data.", complete="model")
    ] = None
    recipe: Annotated[
        str | Recipe,
        Option("Published recipe (see `patchloom recipes`), a recipe.yaml, or auto.", complete="recipe"),
    ] = "auto"
    epochs: Annotated[int | None, Option("Passes over the data. Default: the recipe's.")] = None
    time: Annotated[str | None, Option("Fit the whole run into 90s, 30m, 2h …, planned from a few measured steps.")] = (
        None
    )
    size: Annotated[int | None, Option("Image size in pixels. Default: the recipe's.")] = None
    init: Annotated[
        str | None,
        Option(
            "Start from a run, published weights (in1k, resmlp_s12:in1k) or a file; none: random; "
            "auto: downloaded weights, if any.",
            complete="run",
        ),
    ] = "auto"
    labels: Annotated[str | None, Option("Table with the columns path and label, for a folder of images.")] = None
    out: Annotated[str | None, Option("Run folder. Default: runs/NAME-OF-DATA.")] = None
    device: Annotated[str, Option("cpu, cuda, cuda:1 or mps; auto uses a GPU if there is one.")] = "auto"
    task: Annotated[
        str | None,
        Option(
            "Task to train, if the data allow several. Default: that of the recipe or the data.",
            metavar="classify|multilabel|regress|segment|detect",
            panel=MODEL,
        ),
    ] = None
    teacher: Annotated[
        str | None,
        Option("Distill from a run, timm:NAME, torchvision:NAME …", complete="run", panel=MODEL),
    ] = None
    batch: Annotated[int | None, Option("Images per update over all devices (translation: tokens).", panel=MODEL)] = (
        None
    )
    fit: Annotated[bool, Option("Fit a named recipe to the data and this machine.", panel=MODEL)] = False
    changes: Annotated[
        dict[str, Any],
        Option("Recipe fields to change: augment.mixup=0. Repeatable.", name="set", metavar="FIELD=VALUE", panel=MODEL),
    ] = field(default_factory=dict)
    race: Annotated[
        bool,
        Option("Let candidates of the automatic recipe race for a fifth of the time, on training images.", panel=MODEL),
    ] = True
    stop_after: Annotated[str | None, Option("Stop and save after 30m, 2h …; the same command resumes.", panel=RUN)] = (
        None
    )
    folds: Annotated[
        int | None,
        Option("Cross-validate: K runs, each validated on another part of train.", metavar="K", panel=RUN),
    ] = None
    patience: Annotated[int | None, Option("Stop after N evaluations without improvement.", metavar="N", panel=RUN)] = (
        None
    )
    select: Annotated[
        str | None,
        Option("Metric of val that selects the best weights. Default: top1.", metavar="METRIC", panel=RUN),
    ] = None
    max_error: Annotated[
        float | str | None,
        Option(
            "Abstain from unsure predictions, so that at most this share of the others is wrong: 5%, 0.05.",
            metavar="SHARE",
            panel=RUN,
        ),
    ] = None
    negatives: Annotated[
        tuple[str, ...], Option("Classes that mean none of these. Repeatable.", metavar="CLASS", panel=RUN)
    ] = ()
    pictures: Annotated[
        int | None, Option("Draw the network into RUN/pictures every N epochs.", metavar="N", panel=RUN)
    ] = None
    preview: Annotated[bool, Option("Draw crops and augmented training images before the first step.", panel=RUN)] = (
        False
    )
    trackers: Annotated[
        tuple[str, ...], Option("Also log to tensorboard, wandb, mlflow or trackio. Repeatable.", name="log", panel=RUN)
    ] = ()
    micro_batches: Annotated[
        int | None,
        Option("Split each batch into N micro-batches. Default: as the memory requires.", metavar="N", panel=HARDWARE),
    ] = None
    workers: Annotated[int | None, Option("Processes that read images.", panel=HARDWARE)] = None
    worker_timeout: Annotated[  # equal to WORKER_TIMEOUT_S of data.batches.loader
        float, Option("Seconds without a batch after which a worker counts as hung.", panel=HARDWARE)
    ] = 120.0
    compiled: Annotated[
        bool | None, Option("Use torch.compile. Default: where it pays off.", name="compile", panel=HARDWARE)
    ] = None
    shard: Annotated[bool, Option("Shard weights and optimizer state over the processes (FSDP).", panel=HARDWARE)] = (
        False
    )
    level: Annotated[str | None, Option("Label level to train on, if the data have several.", panel=DATA)] = None
    strict: Annotated[
        bool,
        Option("Treat warnings about the data as errors: unreadable images, stray classes.", panel=DATA),
    ] = False
    label_column: str | None = None
    label_pattern: str | None = None
    taxonomy: str | None = None
    classes: Literal["innermost", "outermost"] | None = None
    images: str | None = None
    masks: str | None = None
    boxes: str | None = None
    ignore: int | None = None
    names: str | None = None
    exclude: str | None = None
    corrections: str | None = None
    val: str | None = None
    # Parts that Python code plugs in, or that the file of --plugin registers (`patchloom.plugins`).
    transform: Callable[..., Any] | None = None
    batch_transform: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] | Sequence[Any] | Callable[..., Any] | None = None
    callbacks: Sequence[Any] = ()
    optimizer: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        data: Any = self.data  # a single path or name may be given without a tuple
        if isinstance(data, list | tuple) and len(data) == 1 and isinstance(data[0], str | os.PathLike):
            data = data[0]
        object.__setattr__(self, "data", tuple(split_specs(data)))

    @property
    def data_text(self) -> str:
        """The data as one string, quoted as a shell would if there are several; run.json records this."""
        return join_specs(self.data)

    @property
    def reading(self) -> Reading:
        """How the data are read."""
        return Reading.from_settings(self)

    def recipe_changes(self) -> dict[str, Any]:
        """Return the options that are recipe fields, by their dotted keys."""
        short = {"schedule.epochs": self.epochs, "model.image_size": self.size, "optim.batch_size": self.batch}
        changes: dict[str, Any] = {key: value for key, value in short.items() if value is not None}
        if self.teacher:
            changes["objective.teacher"] = self.teacher
        return changes | self.changes
