"""Whether a network has learned its training images by heart: its accuracy on them against that on val."""

from collections.abc import Mapping, Sequence
from typing import Any

from patchloom.evaluation.classification import ClassificationReport

FAR_ABOVE = 20.0  # points of accuracy


def training_accuracy(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean accuracy on the augmented images of the last epoch, in percent; None where it was not recorded."""
    rows = [r for r in records if r.get("kind") == "train" and r.get("values", {}).get("accuracy") is not None]
    last = [float(r["values"]["accuracy"]) for r in rows if r.get("epoch") == rows[-1].get("epoch")]
    return sum(last) / len(last) if last else None


def overfitting_note(
    records: Sequence[Mapping[str, Any]], report: ClassificationReport, *, pretrained: bool = False
) -> str:
    """What is wrong and what to do, where training accuracy is far above val accuracy; otherwise ''.

    Records are those of `metrics.jsonl`, `report` is of val. Chance on few val images is no overfitting: training
    accuracy must lie above the interval of val accuracy too. Nor is one epoch, in which every image is new.
    """
    trained, val = training_accuracy(records), report.top(1)
    last_epoch = max((r.get("epoch") or 0 for r in records if r.get("kind") == "train"), default=0)
    if trained is None or last_epoch < 1 or trained - val < FAR_ABOVE or trained <= report.top_interval()[1]:
        return ""
    start = "" if pretrained else " or pretrained weights (--init in1k)"
    return (
        f"overfitting: training accuracy {trained:.1f} %, val top-1 {val:.1f} %. More training images{start} help most;"
        " mixed images (--set augment.mixup=0.8 --set augment.cutmix=1), a smaller network or fewer epochs may help too"
    )
