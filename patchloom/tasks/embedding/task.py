"""To give images vectors by which alike ones are found: DINO, Grafit and those it is compared with."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from patchloom.tasks.images.task import ImageTask

if TYPE_CHECKING:
    from patchloom.engine.distribution import Processes
    from patchloom.models.network import Network
    from patchloom.tasks.images.judges import NeighbourJudge
    from patchloom.tasks.images.plan import ImagePlan


class Embedding(ImageTask):
    """The network names no classes of the data; it is judged by neighbours, if there are labels to judge by."""

    name = "embedding"

    def prepare(self, plan: "ImagePlan", processes: "Processes") -> "ImagePlan":
        """Clusters are found before they are learned."""
        from patchloom.tasks.embedding.clusters import clustered

        if plan.method.learns_from != "clusters":
            return plan
        return replace(plan, clustered=clustered(plan, processes))

    def judge(self, plan: "ImagePlan", processes: "Processes") -> "NeighbourJudge | None":
        """How often the nearest images of train tell the class of one of val."""
        from patchloom.tasks.images.judges import NeighbourJudge

        labeled = all(bool((images.labels >= 0).any()) for images in (plan.splits.train, plan.splits.val))
        return NeighbourJudge(plan, processes) if labeled else None

    def write_files(self, plan: "ImagePlan", network: "Network") -> None:
        """What every run on images keeps, and the clusters it learns."""
        from patchloom.tasks.embedding.clusters import keep_clusters

        super().write_files(plan, network)
        if plan.clustered is not None:
            keep_clusters(plan)

    def in_words(self, run: Any, metrics: Mapping[str, float]) -> str:
        """Top-1 of its neighbours."""
        if run.metric is None:
            return "not evaluated"
        neighbours = run.metric.removeprefix("knn").removesuffix("_top1")
        return f"top-1 of the {neighbours} nearest {metrics[run.metric]:.2f} %"

    def next_commands(self, plan: "ImagePlan") -> Sequence[str]:
        """Judge it at levels or by probes, search by it, or train a classifier from it."""
        folder, data = shlex.quote(str(plan.folder)), shlex.quote(plan.settings.data)
        if plan.settings.level:
            return f"patchloom probe {folder} {data} --levels", f"patchloom look {folder} --ranked"
        if len(plan.splits.classes):
            return f"patchloom probe {folder} {data} --knn --linear", f"patchloom train {data} --init {folder}"
        return f"patchloom index {folder} {data} --out {folder}.index", f"patchloom train LABELLED --init {folder}"
