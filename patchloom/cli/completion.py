"""Names a shell can complete: networks, recipes, runs. Nothing here loads torch: it runs at every press of a key."""

from pathlib import Path

RUNS = Path("runs")


def complete_model(incomplete: str) -> list[str]:
    """Networks whose names begin so."""
    from patchloom.models.catalog import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes whose names begin so."""
    from patchloom.recipes import list_recipes

    return [name for name in ("auto", *list_recipes()) if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Folders of runs whose paths begin so, and published weights; else the shell completes paths as always."""
    found = [str(run) for run in runs_in(RUNS) if str(run).startswith(incomplete)]
    if not incomplete:
        return found
    from patchloom.models.pretrained.table import WEIGHTS

    return found + [weights.name for weights in WEIGHTS if weights.name.startswith(incomplete)]


def runs_in(folder: Path) -> list[Path]:
    """Folders of runs in a folder."""
    return sorted(config.parent for config in folder.glob("*/config.json"))
