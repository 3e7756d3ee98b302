"""`patchloom.compare`: several runs on the same images."""

from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.specs import Data
from patchloom.tasks.classification.several_runs import RunEvaluations, Runs, evaluate, runs_by_name
from patchloom_runtime.errors import UsageError, with_near_options


@with_near_options
def compare(
    runs: Runs,
    data: Data | None = None,
    *,
    agreement: bool = False,
    device: str = "auto",
    split: str | None = None,
    size: int | None = None,
    crop_ratio: float | None = None,
    real: str | None = None,
    v2: bool = False,
    batch: int = 64,
    workers: int = 0,
    strict: bool = False,
    reading: Reading = AS_IT_IS,
    level: str | None = None,
) -> RunEvaluations:
    """Evaluate two or more runs on the same images, or on the val predictions saved in training.

    The result has `comparisons()` of all pairs, `spreads()` over seeds, `disagreement()` and `tradeoffs()` with cost.
    With `agreement`, the heads of distilled networks are evaluated too. Other options are those of `evaluate`.
    """
    if len(runs_by_name(runs)) < 2:
        raise UsageError("compare takes two or more runs; evaluate takes one")
    return evaluate(
        runs, data, device=device, heads=agreement, split=split, size=size, crop_ratio=crop_ratio, real=real, v2=v2,
        batch=batch, workers=workers, strict=strict, reading=reading, level=level,
    )  # fmt: skip
