"""The folder of a run, which is enough alone: every file of it, its format, who writes and who reads it.

    config.json               format, task, network and its options, preprocessing, label level: `config`
    recipe.yaml               what was asked for: `config`
    labels.json               class names, in the order of the outputs: `config`
    weights.safetensors       the best weights so far: `weights`
    checkpoints/step-00000123 what an exact resume needs; the newest two are kept: `checkpoints`
    metrics.jsonl             what was recorded on the way: `metrics`
    data.json, left_out.tsv   what it began with, and what could not be used: `beginning`
    run.json                  how it went: `record`
    checksums.json            of the files above that can change an answer: `checksums`
    predictions.safetensors   of a classifier: what it decided about each val image: `predictions`
    vocabulary.model, val.json  of a translator: its subwords, and what it made of val: `translation`
    clusters.json             of ClusterFit: the cluster of each training image: `clusters`
    report.html, pictures/    for people; nothing reads them

Folders of earlier versions are read by rule: what a file does not say has the value it always had.
"""
