"""`--init auto`: published weights that are in the caches, or an offer to download some."""

from collections.abc import Iterator

from patchloom.models.pretrained.downloads import is_offline
from patchloom.models.pretrained.table import published
from patchloom.recipes.auto import SMALL_PIXELS, pretrained_network
from patchloom.recipes.choices import base_recipe
from patchloom.runs.cached_weights import cached_weights
from patchloom.tasks.settings import TrainingSettings

MOST_MULTIPLY_ADDS = {"cpu": 5e9, "cuda": 20e9}  # per image: larger networks are not chosen without being named
FEW_IMAGES = 20_000  # below, fine-tuning is much better than training from scratch
# Test top-1 from scratch and fine-tuned, both by `auto` in four minutes on one GPU (benchmarks/LOG.md, 2026-11-18).
FINE_TUNED = {"2,640 photos of groceries": (54, 78), "3,680 photos of pets": (22, 87)}


def may_start_from_weights(settings: TrainingSettings, median_side: int) -> bool:
    """Return whether weights may be chosen: for an automatic recipe with a published network, and images of some size.

    Published weights were trained at 224 pixels; enlarged icons and digits gain little and take a thousand times as
    long as a small network.
    """
    fixed = ("model.", "objective.")
    free = ("model.name", "model.image_size")
    changed = [key for key in settings.recipe_changes() if key.startswith(fixed) and key not in free]
    is_automatic = base_recipe(settings.recipe, settings.model) is None
    return is_automatic and not changed and median_side >= SMALL_PIXELS


def cached_starts(model: str | None, device: str) -> Iterator[str]:
    """Yield the cached weights of `model`, or of any network, those that `auto` would choose first."""
    names = cached_weights()
    if model is None:
        preferred = pretrained_network(device)
        yield from sorted(names, key=lambda name: not name.startswith(f"{preferred}:"))
        return
    for name in names:
        network = name.partition(":")[0] if ":" not in model else name.partition(".")[0]
        if network == model or name == model:
            yield name


def offered_start(model: str | None, device: str) -> str:
    """Return the published weights to download for a run, or '' if there are none or the network is disabled."""
    known = published(model or pretrained_network(device))
    return known[0].name if known and not is_offline() else ""


def fine_tuning_advice(images: int, command: str) -> str:
    """Return what fine-tuning would likely give instead of training `images` images from scratch."""
    gains = [f"{tuned} % instead of {scratch} % on {data}" for data, (scratch, tuned) in FINE_TUNED.items()]
    return f"tip: {images:,} images are few. Fine-tuning published weights gave {' and '.join(gains)}: {command}"
