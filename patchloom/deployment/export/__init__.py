"""From a run to an artefact: a folder with a graph, labels and preprocessing that answers where patchloom is absent."""
