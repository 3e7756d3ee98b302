"""`--init`, a run or published weights: network, options, size and crop come from it, unless the user gives them."""

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

# Options of a network that its data, its recipe or its method decide.
NOT_TAKEN = ("name", "num_classes", "image_size", "drop_path", "drop_path_rule", "dropout", "projector")
CHANGED = {"class_tokens"}  # options that a recipe may change: a trained network starts one with others


@dataclass(frozen=True)
class InitWeights:
    """The run whose weights another starts from."""

    init: str  # as it was given
    files: RunFiles

    @property
    def model(self) -> str:
        """Its network as recipes and --model call it."""
        return self.files.model

    @property
    def options(self) -> Mapping[str, Any]:
        """Those of its network; of one with heads of its task on it, those of the network under them."""
        inner = self.files.options.get("backbone")
        return inner if isinstance(inner, Mapping) else self.files.options

    @property
    def image_size(self) -> int:
        """The side it was trained at."""
        return int(self.files.options["image_size"][0])

    def is_bound(self, recipe: str | Recipe | None) -> bool:
        """Whether the user's recipe says itself which network it is for, in full: a file, or a value."""
        return isinstance(recipe, Recipe) or str(recipe).endswith((".yaml", ".yml"))

    def fields(self, recipe: str | Recipe | None) -> dict[str, Any]:
        """Dotted recipe fields that come from the run."""
        if self.is_bound(recipe):
            return {}
        options, published = self.options, default_options(self.files.network)
        base = base_recipe(recipe, self.model)
        asked = set(base.model.options) if base else set()  # which the recipe would set for another network
        hidden = {*NOT_TAKEN, *(asked & CHANGED), *(("backbone", "pool") if ":" in self.model else ())}
        taken = {
            f"model.options.{key}": value
            for key, value in options.items()
            if key not in hidden and (key in asked or value != published.get(key))
        }
        if base is not None and base.model.size_from == "recipe":
            return taken
        shown = self.files.preprocessing
        fields = {"model.image_size": self.image_size, **taken, "test.crop_ratio": shown.crop_ratio}
        if shown.resize != "short_side":
            fields["test.resize"] = shown.resize
        return fields if shown.image_size[0] == self.image_size else {**fields, "test.image_size": shown.image_size[0]}

    def named(self, choices: Iterable[Choice], given: Sequence[str]) -> list[Choice]:
        """The choices, those that come from the run with its name for a reason."""
        taken = {"model.name", "model.image_size", "test.crop_ratio", "test.image_size", "test.resize"} - set(given)
        return [
            replace(choice, why=f"as in {self.init}")
            if choice.key in taken or (choice.key.startswith("model.options.") and choice.key not in given)
            else choice
            for choice in choices
        ]

    def normalize_for(self, network: Network) -> None:
        """Have images normalised for `network` as they were for the run."""
        network.pixel_mean, network.pixel_std = self.files.preprocessing.mean, self.files.preprocessing.std

    def keeps(self, classes: Sequence[str]) -> bool:
        """Whether its classifier is one of these very classes, in their order."""
        return self.files.decides and self.files.labels_as(classes) == tuple(classes)

    def told(self, recipe: Recipe, classes: Sequence[str]) -> str:
        """The run in a line."""
        size, now = self.image_size, recipe.model.image_size
        resampled = f", resampled to {now} px" if now != size else ""
        told = method_of(recipe.objective.method).head
        if told == "places":
            head = f"new head for {plural(len(classes), 'class')}"
        elif told != "classes":
            head = "no classifier"
        elif self.keeps(classes):
            head = f"keeps its classifier of {plural(len(classes), 'class')}"
        else:
            head = f"new classifier for {plural(len(classes), 'class')}"
        return f"{self.init}: {self.model}{_shape(self.options)} at {size} px{resampled}; {head}"


def find_init_weights(init: str | None, recipe: str | Recipe | None, model: str | None) -> InitWeights | None:
    """What the run given as --init is; None where it is a file, or nothing."""
    folder = find_run(init) if init else None
    if init is None or folder is None:
        return None
    start = InitWeights(init, read_run_files(folder))
    if model is None and start.is_bound(recipe):
        base = base_recipe(recipe, None)
        model = base.model.name if base else None
    if model is not None and model not in (start.model, start.files.network):
        raise UsageError(
            f"--init {init} is a {start.model}, and {model} was asked for; leave the network out, or start from "
            f"a run of {model}"
        )
    return start


def _shape(options: Mapping[str, Any]) -> str:
    depth, dim = options.get("depth"), options.get("dim")
    return f" ({depth} layers, {dim} wide)" if isinstance(depth, int) and isinstance(dim, int) else ""
