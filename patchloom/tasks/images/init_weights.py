"""`--init`: the network, options, image size and crop of a run or of published weights, unless the user sets them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from patchloom.models.network import Network
from patchloom.models.registry import default_options
from patchloom.recipes.choices import Choice, base_recipe
from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe
from patchloom.runs.config import RunFiles, read_run_files
from patchloom.runs.locate import find_run
from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import plural

# Network options that are set by the data, the recipe or the method.
NOT_TAKEN = ("name", "num_classes", "image_size", "drop_path", "drop_path_rule", "dropout", "projector")
CHANGED = {"class_tokens"}  # options that a recipe may change in a trained network


@dataclass(frozen=True)
class InitWeights:
    """The run whose weights another run starts from."""

    init: str  # as the user wrote it
    files: RunFiles

    @property
    def model(self) -> str:
        """The name of its network in recipes and --model."""
        return self.files.model

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of its network; for dense tasks, of the backbone."""
        inner = self.files.options.get("backbone")
        return inner if isinstance(inner, Mapping) else self.files.options

    @property
    def image_size(self) -> int:
        """The image size in pixels it was trained at."""
        return int(self.files.options["image_size"][0])

    def is_bound(self, recipe: str | Recipe | None) -> bool:
        """Return whether the recipe is a file or a `Recipe`, which fixes the network and its options."""
        return isinstance(recipe, Recipe) or str(recipe).endswith((".yaml", ".yml"))

    def fields(self, recipe: str | Recipe | None) -> dict[str, Any]:
        """Return the recipe fields that come from the run, by their dotted keys."""
        if self.is_bound(recipe):
            return {}
        options, published = self.options, default_options(self.files.network)
        base = base_recipe(recipe, self.model)
        of_recipe = set(base.model.options) if base else set()
        hidden = {*NOT_TAKEN, *(of_recipe & CHANGED), *(("backbone", "pool") if ":" in self.model else ())}
        taken = {
            f"model.options.{key}": value
            for key, value in options.items()
            if key not in hidden and (key in of_recipe or value != published.get(key))
        }
        if base is not None and base.model.size_from == "recipe":
            return taken
        used = self.files.preprocessing
        fields = {"model.image_size": self.image_size, **taken, "test.crop_ratio": used.crop_ratio}
        if used.resize != "short_side":
            fields["test.resize"] = used.resize
        return fields if used.image_size[0] == self.image_size else {**fields, "test.image_size": used.image_size[0]}

    def named(self, choices: Iterable[Choice], fixed: Sequence[str]) -> list[Choice]:
        """Return the choices, with the run as the reason of those that come from it."""
        taken = {"model.name", "model.image_size", "test.crop_ratio", "test.image_size", "test.resize"} - set(fixed)
        return [
            replace(choice, why=f"as in {self.init}")
            if choice.key in taken or (choice.key.startswith("model.options.") and choice.key not in fixed)
            else choice
            for choice in choices
        ]

    def normalize_for(self, network: Network) -> None:
        """Give `network` the pixel mean and std of the run."""
        network.pixel_mean, network.pixel_std = self.files.preprocessing.mean, self.files.preprocessing.std

    def keeps(self, classes: Sequence[str]) -> bool:
        """Return whether its classifier has exactly these classes, in this order."""
        return self.files.decides and self.files.labels_as(classes) == tuple(classes)

    def text(self, recipe: Recipe, classes: Sequence[str]) -> str:
        """Return the run and what is taken from it in one line."""
        size, now = self.image_size, recipe.model.image_size
        resampled = f", resampled to {now} px" if now != size else ""
        kind = method_of(recipe.objective.method).head
        if kind == "places":
            head = f"new head for {plural(len(classes), 'class')}"
        elif kind != "classes":
            head = "no classifier"
        elif self.keeps(classes):
            head = f"keeps its classifier of {plural(len(classes), 'class')}"
        else:
            head = f"new classifier for {plural(len(classes), 'class')}"
        return f"{self.init}: {self.model}{_shape(self.options)} at {size} px{resampled}; {head}"


def find_init_weights(init: str | None, recipe: str | Recipe | None, model: str | None) -> InitWeights | None:
    """Return the run that --init names; None if it names a file or is not set."""
    folder = find_run(init) if init else None
    if init is None or folder is None:
        return None
    start = InitWeights(init, read_run_files(folder))
    if model is None and start.is_bound(recipe):
        base = base_recipe(recipe, None)
        model = base.model.name if base else None
    if model is not None and model not in (start.model, start.files.network):
        raise UsageError(
            f"--init {init} is a {start.model}, not a {model}; drop --model, or start from a run of {model}"
        )
    return start


def _shape(options: Mapping[str, Any]) -> str:
    depth, dim = options.get("depth"), options.get("dim")
    return f" ({depth} layers, {dim} wide)" if isinstance(depth, int) and isinstance(dim, int) else ""
