"""Training of embedding networks: DINO, Grafit, ClusterFit."""

from dataclasses import replace

from patchloom.engine.distribution import Processes
from patchloom.models.network import Network
from patchloom.tasks.embedding.clusters import clustered, keep_clusters
from patchloom.tasks.images.judges import NeighborJudge
from patchloom.tasks.images.plan import ImagePlan
from patchloom.tasks.images.training import WholeImageTraining


class EmbeddingTraining(WholeImageTraining):
    """A network without a classifier for the data's classes, evaluated by nearest neighbors if there are labels."""

    def prepare(self, plan: ImagePlan, processes: Processes) -> ImagePlan:
        """Find the clusters that are learned."""
        if plan.method.learns_from != "clusters":
            return plan
        return replace(plan, clustered=clustered(plan, processes))

    def judge(self, plan: ImagePlan, processes: Processes) -> NeighborJudge | None:
        labeled = all(bool((images.labels >= 0).any()) for images in (plan.splits.train, plan.splits.val))
        return NeighborJudge(plan, processes) if labeled else None

    def write_files(self, plan: ImagePlan, network: Network) -> None:
        super().write_files(plan, network)
        if plan.clustered is not None:
            keep_clusters(plan)
