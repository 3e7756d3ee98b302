import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.recipes import Recipe, difference, field_names, flatten, get_recipe, list_recipes, override
from patchloom.recipes.methods import METHODS
from patchloom.recipes.parts import GROUPS, AugmentPart, ModelPart, OptimPart, SchedulePart, fields_of
from patchloom_runtime.errors import UsageError
from tests.messages import refused

DEIT = get_recipe("deit")


def error_of(action, *args, **kwargs):
    with pytest.raises(UsageError) as caught:
        action(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_survives_its_text_form(name):
    recipe = get_recipe(name)
    assert recipe.name == name
    assert "\n" not in recipe.source
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(recipe) == hash(get_recipe(name))


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_takes_another_network(name):
    assert get_recipe(name, "resmlp_s24").model.name == "resmlp_s24"


@pytest.mark.parametrize("group", GROUPS)
def test_every_field_is_read_by_some_method(group):
    unread = [
        name
        for name in fields_of(GROUPS[group])
        if not any(method.reads_field(group, name) for method in METHODS.values())
    ]
    assert unread == []


def test_hyphens_are_underscores():
    assert get_recipe("translation-resmlp") == get_recipe("translation_resmlp")


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.image_size", 32), ("model.drop_path", 0.1), ("augment.flip", 0.0), ("optim.ema_decay", 0.9)],
)
def test_translation_refuses_what_it_does_not_read(key, value):
    with refused(UsageError, key, value, "translation"):
        override(get_recipe("translation_small"), {key: value})


def test_the_smallest_small_view_is_not_above_the_largest():
    with refused(UsageError, "views.local_max_scale", 0.4, "views.local_min_scale", 0.5):
        override(get_recipe("dino"), {"views.local_min_scale": 0.5})


def test_another_method_leaves_behind_what_only_the_first_read():
    grafit = get_recipe("grafit")
    plain = override(grafit, {"objective.method": "classification"})
    assert plain.views == get_recipe("deit").views != grafit.views
    assert plain.optim == grafit.optim
    with refused(UsageError, "views.number", 2, "classification"):
        override(grafit, {"objective.method": "classification", "views.number": 2})


def test_the_text_form_of_translation_has_no_images():
    values = get_recipe("translation_small").to_dict()
    assert set(values) == {"name", "source", "seed", "precision", "model", "objective", "text", "optim", "schedule"}
    assert set(values["model"]) == {"name", "dropout", "options"}
    assert set(values["objective"]) == {"method", "smoothing"}
    assert "text" not in get_recipe("deit").to_dict()


def test_recipes_by_pattern():
    assert list_recipes("wightman_*") == ["wightman_a2", "wightman_a1", "wightman_a3"]
    assert list_recipes("nothing*") == []


def test_unknown_recipe():
    with refused(UsageError, "diet", "deit", "deit3", "vitdet"):
        get_recipe("diet")
    with refused(UsageError, "qqqq", "patchloom recipes"):
        get_recipe("qqqq")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("augment.mixup", "0", 0.0),
        ("optim.lr", "1e-3", 1e-3),
        ("optim.batch_size", "1e3", 1000),
        ("optim.clip_norm", "none", None),
        ("optim.clip_norm", "1", 1.0),
        ("optim.betas", "0.9, 0.95", (0.9, 0.95)),
        ("model.eval_mode", "true", True),
        ("objective.loss", "cross_entropy", "cross_entropy"),
        ("augment.policy", "none", "none"),
        ("test.image_size", "288", 288),
        ("seed", "7", 7),
        ("model.options.scale_init", "1e-4", 1e-4),
        ("model.options.norm", "layernorm", "layernorm"),
        ("model.options.depths", "2,8,14,2", (2, 8, 14, 2)),
        ("model.options.depths", "[2, 8, 14, 2]", (2, 8, 14, 2)),
        ("model.options.depths", "(2,8,14,2)", (2, 8, 14, 2)),
        ("model.options.global_stages", "[]", ()),
        ("model.options.global_stages", "[4]", (4,)),
        ("model.options.exchanged", "(0)", (0,)),
        ("model.options.identity", "false", False),
        ("optim.batch_size", 64, 64),
        ("optim.betas", [0.8, 0.9], (0.8, 0.9)),
        ("augment.saturation", "none", None),
        ("augment.saturation", "0.2", 0.2),
    ],
)
def test_override_reads_text_by_the_field_type(key, text, value):
    changed = flatten(override(DEIT, {key: text}))[key]
    assert changed == value
    assert type(changed) is type(value)


def test_override_changes_nothing_else():
    changed = override(DEIT, {"augment.mixup": "0", "schedule.epochs": "100"})
    assert difference(DEIT, changed) == {"augment.mixup": (0.8, 0.0), "schedule.epochs": (300, 100)}
    assert DEIT.augment.mixup == 0.8


def test_override_checks_fields_together():
    for text in ("30,60", "[30, 60]"):
        changes = {"schedule.decay": "step", "schedule.step_epochs": text}
        assert override(DEIT, changes).schedule.step_epochs == (30, 60)


def test_options_are_added_one_by_one():
    cait = override(get_recipe("cait"), {"model.options.norm": "layernorm"})
    assert dict(cait.model.options) == {"scale_init": 1e-5, "norm": "layernorm"}
    assert difference(get_recipe("cait"), cait) == {"model.options.norm": (None, "layernorm")}


def test_written_by_hand():
    recipe = Recipe.from_yaml(
        "name: mine\nsource: me\nmodel: {name: resmlp_s12, options: {scale_init: 1e-4}}\n"
        "optim: {lr: 1e-3, batch_size: 64}\nschedule: {epochs: 10}\n"
    )
    assert recipe.optim.lr == 1e-3
    assert recipe.model.options["scale_init"] == 1e-4
    assert recipe.augment == AugmentPart()


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"augment.mixpu": 0}, ("augment.mixpu", "augment.mixup")),
        ({"lr": 1}, ("optim.lr",)),
        ({"optim.rl": 1}, ("optim.rl", "optim.lr", "optim.name")),
        ({"qqqq": 1}, ("qqqq", "model", "augment", "objective", "dino", "segment", "detect", "optim", "schedule")),
        ({"optim.name": "adamx"}, ("optim.name", "adamx", "adamw", "lamb", "sgd", "adagrad")),
        ({"augment.erasing": 1.5}, ("augment.erasing", 1.5, 0, 1)),
        ({"optim.lr": "fast"}, ("optim.lr", "fast", 0)),
        ({"optim.lr": "nan"}, ("optim.lr", "nan", 0)),
        ({"optim.lr": True}, ("optim.lr", "True", 0)),
        ({"schedule.epochs": 2.5}, ("schedule.epochs", 2.5, 1)),
        ({"model.eval_mode": 1}, ("model.eval_mode", 1, "true", "false")),
        ({"optim.betas": "0.9"}, ("optim.betas", 0.9, 2)),
        ({"test.crop_ratio": 0}, ("test.crop_ratio", 0, 1)),
        ({"name": "two\nlines"}, ("name", r"two\nlines")),
        ({"name": ""}, ("name", "''")),
        ({"model.options.f": object}, ("model.options.f", "object")),
        ({"objective.loss": "bce"}, ("objective.loss", "bce", "objective.smoothing", 0.1, "cross_entropy")),
        (
            {"objective.teacher": "timm:x"},
            ("objective.teacher", "timm:x", "objective.distillation", "none", "hard", "soft"),
        ),
        ({"schedule.warmup_steps": 10}, ("schedule.warmup_epochs", 5, "schedule.warmup_steps", 10)),
        ({"schedule.epochs": 2}, ("schedule.warmup_epochs", 5, 2)),
        ({"schedule.decay": "step"}, ("schedule.decay", "schedule.step_epochs")),
        ({"schedule.decay": "step", "schedule.step_epochs": "60,30"}, ("schedule.step_epochs", "60,30")),
        ({"text.beams": 2}, ("text.beams", 2, "classification")),
        ({"augment.hue": 0.6}, ("augment.hue", 0.6, 0, 0.5)),
        (
            {"augment.crop_min_scale": 0.5, "augment.crop_max_scale": 0.4},
            ("augment.crop_max_scale", 0.4, "augment.crop_min_scale", 0.5),
        ),
        ({"schedule.min_lr": 1}, ("schedule.min_lr", 1, 0.001)),
    ],
)
def test_errors_say_what_to_do(changes, facts):
    with refused(UsageError, *facts):
        override(DEIT, changes)


def test_distillation_without_a_teacher_is_left_to_the_run():
    assert override(DEIT, {"objective.distillation": "hard"}).objective.teacher is None


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("- 1", ("to_yaml",)),
        ("model: resmlp", ("model", "resmlp", "model.name")),
        ("modle: {}", ("modle", "model.name")),
        ("optim: {lrr: 1}", ("optim.lrr", "optim.lr")),
        ("optim: {lr: 1}", ("optim.batch_size",)),
        ("name: x", ("source",)),
    ],
)
def test_files_are_checked(text, facts):
    with refused(UsageError, *facts):
        Recipe.from_yaml(text)


def test_broken_yaml_is_one_line():
    message = error_of(Recipe.from_yaml, "a: [1\nb: 2")
    assert "YAML" in message
    assert "\n" not in message


def test_no_python_objects_from_yaml():
    assert "YAML" in error_of(Recipe.from_yaml, "!!python/object/apply:os.getcwd []")


def test_frozen():
    with pytest.raises(AttributeError):
        DEIT.optim.lr = 1.0
    with pytest.raises(TypeError):
        get_recipe("cait").model.options["scale_init"] = 1.0


def test_learning_rate_follows_the_batch():
    assert OptimPart(lr=5e-4, lr_reference_batch=512, batch_size=1024).peak_lr == 1e-3
    assert OptimPart(lr=5e-4, batch_size=1024).peak_lr == 5e-4


def test_importing_recipes_brings_no_torch():
    code = "import sys, patchloom.recipes; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


lines = st.text(min_size=1).filter(str.isprintable)
numbers = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | numbers | lines | st.just("")
FIELDS = {
    "seed": st.integers(0, 2**63),
    "precision": st.sampled_from(["auto", "bf16", "fp16", "fp32"]),
    "source": lines,
    "model.name": lines,
    "model.drop_path": st.floats(0, 1),
    "model.eval_mode": st.booleans(),
    "model.gradient_checkpointing": st.booleans(),
    "augment.mixup": st.floats(0, 1e300),
    "augment.repeats": st.integers(1, 10),
    "objective.smoothing": st.floats(0, 1),
    "optim.lr": st.floats(1e-4, 1e300),
    "optim.lr_reference_batch": st.none() | st.integers(1, 1024),
    "optim.betas": st.tuples(st.floats(0, 1), st.floats(0, 1)),
    "optim.clip_norm": st.none() | st.floats(1e-300, 1e300),
    "schedule.epochs": st.integers(5, 10**6),
    "test.image_size": st.none() | st.integers(1, 4096),
}
options = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True).map("model.options.{}".format),
    scalars.filter(lambda v: not isinstance(v, str) or not any(w in v.lower() for w in ("nan", "inf"))),
    max_size=3,
)


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS), options)
def test_overrides_survive_the_text_form(fields, options):
    recipe = override(DEIT, fields | options)
    again = Recipe.from_yaml(recipe.to_yaml())
    assert again == recipe
    assert difference(recipe, again) == {}
    flat = flatten(recipe)
    assert {key: flat[key] for key in fields} == fields


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_text_means_what_the_value_means(fields):
    def as_text(value):
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    texts = {key: value if isinstance(value, str) else as_text(value) for key, value in fields.items()}
    assert override(DEIT, texts) == override(DEIT, fields)


def test_every_field_is_reachable_by_its_key():
    flat = flatten(DEIT)
    assert set(field_names()) - {"model.options"} == set(flat)
    for key, value in flat.items():
        assert override(DEIT, {key: value}) == DEIT


def test_parts_stand_alone():
    assert ModelPart(name="x").options == {}
    with refused(UsageError, "schedule.epochs", 0, 1):
        SchedulePart(epochs=0)
