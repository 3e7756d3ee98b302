"""The run folder: every file in it, its format, its reader and its writer. A run folder is self-contained.

| File | Contents | Module |
|---|---|---|
| config.json | format, task, network and its options, preprocessing, label level | `config` |
| recipe.yaml | the recipe | `config` |
| labels.json | class names, in the order of the outputs | `config` |
| names.json | published networks: synonyms of the class names | `config` |
| weights.safetensors | the best weights so far | `weights` |
| checkpoints/step-00000123/ | state for an exact resume; the newest two are kept | `checkpoints` |
| metrics.jsonl | one record per evaluation or logged step | `metrics` |
| data.json, left_out.tsv | data and initial weights; files that could not be read | `provenance` |
| run.json | how the run went | `run_metadata` |
| checksums.json | SHA-256 of the files above that affect predictions | `checksums` |
| README.md | model card | `model_card` |
| published.json | published networks: the row of the table of weights | `locate` |
| report.html, pictures/ | for people | `report.run_report` |
| pictures/branch_norms.json | how much each residual branch adds, per epoch | `branch_norms` |

Files of single tasks:

| File | Contents | Module |
|---|---|---|
| predictions.safetensors | classification: the prediction for each validation image | `predictions` |
| clusters.json | embedding with ClusterFit: the cluster of each training image | `tasks.embedding.training` |
| teacher_labels.json | classification without labels: the teacher's classes | `tasks.classification.teacher_labels` |
| segmented.safetensors | segmentation: results per validation image | `tasks.segmentation.run_files` |
| val.json | detection: objects and detections of the validation images | `tasks.detection.run_files` |
| vocabulary.model, val.json | translation: subwords; scores and samples | `tasks.translation.run_files` |

Folders of earlier versions can be read: a missing field has the value that it had before the field existed.
"""
