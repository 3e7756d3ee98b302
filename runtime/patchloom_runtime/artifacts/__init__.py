"""Exported models: `artifact.json`, `load`, and the predictors of each task."""

# Task → its predictor, as module:class. A task with a predictor outside of this package adds its row.
PREDICTORS = {
    "classification": "patchloom_runtime.artifacts.artifact:ArtifactClassifier",
    "multilabel": "patchloom_runtime.artifacts.multilabel:ArtifactMultilabel",
    "regression": "patchloom_runtime.artifacts.regression:ArtifactRegressor",
    "embedding": "patchloom_runtime.artifacts.artifact:ArtifactClassifier",
    "segmentation": "patchloom_runtime.artifacts.segmenter:ArtifactSegmenter",
    "detection": "patchloom_runtime.artifacts.detector:ArtifactDetector",
    "translation": "patchloom_runtime.artifacts.translator:ArtifactTranslator",
}
