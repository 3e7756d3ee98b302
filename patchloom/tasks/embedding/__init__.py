"""Embeddings that place similar images close together: DINO, Grafit and their baselines."""

from patchloom.tasks.task import Task

TASK = Task(
    name="embedding",
    training="patchloom.tasks.embedding.training:EmbeddingTraining",
    model="patchloom.tasks.classification.model:ClassifierLoader",
    report="patchloom.tasks.embedding.report:EmbeddingReporting",
    export="patchloom.tasks.classification.export:ClassifierSubject",
    serving="patchloom.tasks.classification.serving:ClassifierServing",
    whole_images=True,
)
