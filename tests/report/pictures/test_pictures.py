"""Pictures of each family, looks at single images, and pictures during training."""

import itertools
import re
import xml.etree.ElementTree as Tree

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.report.charts import Point, Series, line_chart, scatter_chart, svg_file
from patchloom.report.charts.svg import LETTER
from patchloom.report.pictures.attention import class_attention
from patchloom.report.pictures.epoch_pictures import EpochPictures
from patchloom.report.pictures.look import HEAD_SIDE, head_sheet, look, look_sheet, network_inputs
from patchloom.report.pictures.overlays import SIDE, attention_tile
from patchloom.report.pictures.pictures import Picture, PictureNote, pictures_of
from patchloom.report.pictures.sheets import GAP, LABEL, MARGIN, PAGE, POSITIVE
from patchloom.runs.branch_norms import read_branch_norms
from patchloom.runs.config import Preprocessing
from patchloom_runtime.errors import UsageError
from tests.networks import small
from tests.report.pictures.test_attention import pointing

NAMES = ["ant", "bee", "cat", "dog", "elk"]
ALWAYS = ["filters"]
WITH_IMAGES = ["branches"]
FAMILIES = {
    "resmlp_s12": (["interactions", "sparsity"], ["looks"]),
    "mixer_b16": (["units"], ["looks"]),
    "smlpnet_t": (["rows"], ["looks"]),
    "deit_ti": ([], ["looks", "head"]),
    "deit_s_distilled": ([], ["looks", "head", "distillation"]),
    "deit3_h26x2": ([], ["looks", "head"]),
    "cait_xxs24": ([], ["looks", "head"]),
    "patchconvnet_s60": ([], ["looks", "head"]),
}
KINDS = {*ALWAYS, *WITH_IMAGES, *(kind for kinds in FAMILIES.values() for some in kinds for kind in some)}
KINDS |= {"embeddings", "energy"}


def by_kind(pictures: list[Picture]) -> dict[str, Picture]:
    """Return the pictures by the word of KINDS in their title."""
    result = {}
    for picture in pictures:
        (kind,) = KINDS & set(re.findall(r"\w+", picture.title.lower()))
        result[kind] = picture
    assert len(result) == len(pictures)
    return result


def photographs(count: int = 2, size: tuple[int, int] = (50, 40)) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (*size[::-1], 3), np.uint8)) for _ in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_its_pictures_and_no_others(name):
    network = small(name)
    of_weights, of_images = FAMILIES[name]
    assert by_kind(pictures_of(network)).keys() == {*of_weights, *ALWAYS}
    drawn = pictures_of(network, photographs(), NAMES)
    assert by_kind(drawn).keys() == {*of_weights, *ALWAYS, *of_images, *WITH_IMAGES}
    for _, image, caption in drawn:
        assert not isinstance(image, PictureNote)
        assert not isinstance(image, Image.Image) or image.width <= PAGE + 20
        assert caption.endswith(".")


@pytest.mark.parametrize(
    ("name", "options", "absent"),
    [
        ("resmlp_s12", {"communication": "mlp"}, "interactions"),
        ("resmlp_s12", {"pool": "class_mlp"}, "looks"),
        ("mixer_b16", {"untied": True}, "units"),
        ("mixer_b16", {"groups": 2}, "units"),
        ("smlpnet_t", {"global_stages": ()}, "rows"),
        ("patchconvnet_s60", {"pool": "average"}, "head"),
        ("deit_ti", {"pool": "average"}, "head"),
        ("resnet50_attention_pool", {}, "branches"),
        ("resmlp_s12", {"num_classes": 0, "pool": "class_mlp"}, "looks"),
    ],
)
def test_pictures_that_an_ablation_lacks_are_absent(name, options, absent):
    drawn = pictures_of(small(name, **options), photographs())
    assert absent not in by_kind(drawn)
    assert drawn
    assert not any(isinstance(picture.image, PictureNote) for picture in drawn)


def test_captions_match_the_pictures():
    def caption(name: str, kind: str, **options) -> str:
        drawn = pictures_of(small(name), photographs(12), NAMES, **options)
        return by_kind(drawn)[kind].caption

    def colors(text: str) -> set[str]:
        return set(re.findall(r"\b(?:red|blue|yellow)\b", text.lower()))

    evidence, attended, rolled = (caption(name, "looks") for name in ("resmlp_s12", "cait_xxs24", "deit_ti"))
    assert colors(evidence) == {"red", "blue"}
    assert "red" not in colors(attended)
    assert [("rollout" in text.lower()) for text in (evidence, attended, rolled)] == [False, False, True]
    untold = pictures_of(small("mixer_b16", num_classes=0), photographs())
    assert colors(by_kind(untold)["looks"].caption) == {"yellow", "blue"}
    answers, classes = (caption("resmlp_s12", "embeddings", labels=labels) for labels in (None, [0] * 12))
    assert answers != classes


def test_many_images_are_placed_in_the_colors_of_their_labels():
    network = small("resmlp_s12")
    drawn = by_kind(pictures_of(network, photographs(12), NAMES, labels=[0, 4] * 6))
    chart = drawn["embeddings"].image
    assert chart.count("<circle") == 12 + 2
    assert {name for name in NAMES if f">{name}</text>" in chart} == {"ant", "elk"}
    assert "energy" in drawn
    with pytest.raises(UsageError) as error:
        pictures_of(network, photographs(12), NAMES, labels=[0] * 11)
    assert "11" in str(error.value)
    assert "12" in str(error.value)


def test_a_failed_picture_becomes_a_note_and_the_rest_are_drawn():
    network = small("resmlp_s12")
    with torch.no_grad():
        network.blocks[1].tokens.mix.weight[0, 0] = torch.inf
    drawn = by_kind(pictures_of(network))
    assert isinstance(drawn["interactions"].image, PictureNote)
    assert isinstance(drawn["filters"].image, Image.Image)


def test_a_bug_is_not_hidden():
    network = small("resmlp_s12")
    network.blocks[0].tokens.mix.grid = (3, 3)
    with pytest.raises(ValueError, match="reshape"):
        pictures_of(network)


def test_foreign_networks_and_wrong_names_are_one_line():
    with pytest.raises(UsageError, match="Linear"):
        pictures_of(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError) as error:
        pictures_of(small("resmlp_s12"), class_names=["a", "b", "c"])
    assert "3" in str(error.value)
    assert "5" in str(error.value)
    with pytest.raises(UsageError):
        look(small("resmlp_s12"), None, [])


def test_a_look_has_the_prediction_of_the_network():
    network = small("deit_ti")
    inputs = Preprocessing((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), (32, 32), 0.8)
    photograph = photographs(1)[0]
    (one,) = look(network, inputs, [photograph], NAMES, top=3)
    assert one.seen.size == (32, 32)
    pixels = torch.from_numpy(np.asarray(one.seen).copy()).permute(2, 0, 1)[None] / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (inputs.mean, inputs.std))
    with torch.no_grad():
        expected = network((pixels - mean) / std).softmax(dim=-1)[0]
    best = expected.argsort(descending=True)[:3].tolist()
    assert [name for name, _ in one.answers] == [NAMES[i] for i in best]
    assert [share for _, share in one.answers] == pytest.approx([expected[i].item() for i in best], abs=1e-5)
    assert [cell.caption for cell in one.maps] == ["rollout", "layer 2"]


@pytest.mark.parametrize(
    ("name", "options", "captions"),
    [
        ("cait_xxs24", {}, ["class layer 1", "class layer 2"]),
        ("patchconvnet_s60", {}, ["pooling"]),
        ("deit_s_distilled", {}, ["rollout", "rollout, distillation token", "layer 2"]),
        ("resmlp_s12", {"pool": "class_mlp"}, []),
    ],
)
def test_a_look_has_the_maps_of_its_family(name, options, captions):
    (one,) = look(small(name, **options), None, photographs(1), NAMES)
    assert [cell.caption for cell in one.maps] == captions
    assert all(cell.image.size == (SIDE, SIDE) for cell in one.maps)


@pytest.mark.parametrize("classes", [2, 5])
def test_a_token_per_class_gives_maps_of_the_three_most_likely(classes):
    network = small("patchconvnet_s60", class_tokens="per_class", num_classes=classes)
    (one,) = look(network, None, photographs(1), NAMES[:classes])
    likeliest = [f"{name}: {100 * share:.0f} %" for name, share in one.answers[:3]]
    assert [cell.caption for cell in one.maps] == likeliest
    assert len({cell.image.tobytes() for cell in one.maps}) == min(3, classes)


def test_the_map_is_bright_where_the_network_was_built_to_look():
    """A white square on black and a CaiT that attends to bright patches: only the square is yellow."""
    network = pointing("cait_xxs24")
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[8:16, 16:24] = 255
    (one,) = look(network, Preprocessing((0, 0, 0), (1, 1, 1), (32, 32), 1.0), [Image.fromarray(pixels)])
    over = np.asarray(one.maps[0].image).astype(int)
    yellow = over[..., 0] - over[..., 2]
    scale = SIDE // 32
    inside = np.zeros_like(yellow, bool)
    inside[8 * scale : 16 * scale, 16 * scale : 24 * scale] = True
    assert yellow[inside].max() > 50
    row, column = np.unravel_index(yellow.argmax(), yellow.shape)
    assert inside[row, column]
    assert yellow[:, : 8 * scale].max() < 0


def test_evidence_is_red_in_the_square_that_speaks_for_the_class():
    network = pointing("resmlp_s12")
    with torch.no_grad():
        network.classifier.weight[3, 0] = 2.0
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[8:16, 16:24] = 255
    (one,) = look(network, Preprocessing((0, 0, 0), (1, 1, 1), (32, 32), 1.0), [Image.fromarray(pixels)], NAMES)
    assert one.answers[0][0] == "dog"
    assert "dog" in one.maps[0].caption
    assert f"{100 * one.answers[0][1]:.0f} %" in one.maps[0].caption
    over = np.asarray(one.maps[0].image).astype(int)
    red = over[..., 0] - over[..., 2]
    row, column = np.unravel_index(red.argmax(), red.shape)
    assert (row // (SIDE // 4), column // (SIDE // 4)) == (1, 2)
    assert red.max() > 0.5 * (POSITIVE[0] - POSITIVE[2])


def test_classes_above_a_tenth_are_named_on_the_sheet():
    (one,) = look(small("cait_xxs24"), None, photographs(1), NAMES)
    line = one.sheet_row()
    assert line.title == ", ".join(f"{name}: {100 * share:.0f} %" for name, share in one.answers if share > 0.1)
    assert [cell.caption for cell in line.cells[1:]] == ["class layer 1", "class layer 2"]  # the first is the picture
    (nameless,) = look(small("cait_xxs24", num_classes=0), None, photographs(1))
    assert nameless.answers == []
    assert nameless.sheet_row().title == ""


def test_a_sheet_of_heads_has_a_row_a_layer_and_fits_the_page():
    network = small("deit_ti", depth=3, heads=4)
    inputs = network_inputs(network, None, photographs(3))
    one, two = (head_sheet(inputs, count=count) for count in (1, 2))
    rows = round((two.height - one.height) / 3)
    assert one.height == two.height - 3 * rows
    wide = head_sheet(network_inputs(small("deit_ti", dim=64, heads=32), None, photographs(1)))
    assert wide.width <= PAGE
    assert look_sheet(look(network, None, photographs(3))).height > 3 * SIDE


@pytest.mark.parametrize(
    ("name", "options"), [("patchconvnet_s60", {"class_tokens": "per_class"}), ("cait_xxs24", {}), ("deit_ti", {})]
)
def test_the_last_tile_is_the_last_head_of_the_last_layer_for_the_predicted_class(name, options):
    network = small(name, **options)
    inputs = network_inputs(network, None, photographs(1))
    token = int(inputs.probabilities[0].argmax()) if options else 0
    layers = class_attention(network, inputs.images)
    expected = attention_tile(layers[-1].weights[0, -1, token].numpy(), HEAD_SIDE)
    picture = head_sheet(inputs)
    right, below = picture.width - MARGIN - GAP, MARGIN + LABEL + len(layers) * (HEAD_SIDE + GAP) - GAP
    tile = picture.crop((right - HEAD_SIDE, below - HEAD_SIDE, right, below))
    assert tile.tobytes() == expected.tobytes()


def test_another_size_half_precision_and_training_mode_are_looked_at_too():
    network = small("cait_xxs24").to(torch.bfloat16).train()
    inputs = network_inputs(
        network, Preprocessing(network.pixel_mean, network.pixel_std, (48, 32), 1.0), photographs(2)
    )
    assert inputs.images.shape == (2, 3, 48, 32)
    assert inputs.images.dtype == torch.bfloat16
    assert inputs.probabilities.sum(axis=1) == pytest.approx(np.ones(2), abs=1e-2)
    assert network.training
    assert network.config.image_size == (32, 32)


# In the course of a training ----------------------------------------------------------------------------------------


def test_pictures_of_epochs_are_named_by_them_and_change_with_the_weights(tmp_path):
    network = small("resmlp_s12")
    inputs = Preprocessing(network.pixel_mean, network.pixel_std, (32, 32), 1.0)
    draw = EpochPictures(tmp_path, photographs(), NAMES, preprocessing=inputs, every=2, last=5)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for epoch in range(1, 6):
        draw(network, epoch)
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "branch_norms.json",
        "epoch_0002.png",
        "epoch_0004.png",
        "epoch_0005.png",
    ]
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    with Image.open(tmp_path / "pictures" / "epoch_0004.png") as picture:
        earlier = np.asarray(picture).copy()
    assert earlier.shape[1] <= PAGE + 20
    norms = read_branch_norms(tmp_path)
    assert list(norms) == [2, 4, 5]
    assert {kind: len(ratios) for kind, ratios in norms[4].items()} == {"tokens": 2, "channels": 2}
    with torch.no_grad():
        network.blocks[0].tokens.mix.weight.mul_(-2)
    draw(network, 4)
    again = read_branch_norms(tmp_path)  # as a run that goes on from before epoch 4 leaves it
    assert list(again) == [2, 4]
    assert again[4]["tokens"][0] > 1.2 * norms[4]["tokens"][0]
    with Image.open(tmp_path / "pictures" / "epoch_0004.png") as picture:
        assert not np.array_equal(np.asarray(picture), earlier)
    EpochPictures(tmp_path / "other", [], NAMES, preprocessing=inputs, every=1, last=1, is_main=False)(network, 1)
    assert not (tmp_path / "other").exists()


def test_a_note_is_drawn_in_the_picture_of_an_epoch(tmp_path):
    network = small("resmlp_s12")
    with torch.no_grad():
        network.blocks[0].tokens.mix.weight[0, 0] = torch.inf
    inputs = Preprocessing(network.pixel_mean, network.pixel_std, (32, 32), 1.0)
    EpochPictures(tmp_path, [], NAMES, preprocessing=inputs, every=1, last=1)(network, 1)
    with Image.open(tmp_path / "pictures" / "epoch_0001.png") as picture:
        assert picture.width > 400  # the reason is longer than the filters are wide


# Charts -------------------------------------------------------------------------------------------------------------


def test_a_scatter_puts_points_where_their_values_are():
    chart = scatter_chart(
        [Point(70, 60, "Ti", "DeiT"), Point(80, 70, "S12", "ResMLP"), Point(75, 65, "<b>", "DeiT")],
        x_label="val, %",
        y_label="v2, %",
        named=True,
    )
    centers = [tuple(float(part.split('"')[i]) for i in (1, 3)) for part in chart.split("<circle ")[1:4]]
    (x0, y0), (x1, y1), (x2, y2) = centers
    assert (x2, y2) == pytest.approx(((x0 + x1) / 2, (y0 + y1) / 2))
    assert x0 < x1
    assert y1 < y0  # higher values stand higher
    for text in (">Ti</text>", ">S12</text>", ">&lt;b&gt;</text>", ">val, %</text>", ">v2, %</text>", ">DeiT</text>"):
        assert text in chart


def test_names_of_close_points_do_not_cover_one_another():
    close = [Point(50 + i / 10, 50 + i / 10, f"network {i}") for i in range(4)]
    chart = scatter_chart([Point(0, 0, "low"), *close, Point(100, 100, "high")], x_label="x", y_label="y", named=True)
    baselines = [
        float(part.split('y="')[1].split('"')[0])
        for part in chart.split("<text ")
        if "network" in part and 'y="' in part
    ]
    anchors = [part.split('text-anchor="')[1].split('"')[0] for part in chart.split("<text ") if "network" in part]
    places = list(zip(anchors, baselines, strict=True))
    for side in ("start", "end"):
        ys = sorted(y for anchor, y in places if anchor == side)
        assert all(later - earlier >= 8 for earlier, later in itertools.pairwise(ys))


def test_a_name_is_not_cut_off_where_points_are_crowded():
    crowded = [(78.3, 27.2, "a"), (79.9, 22.5, "12, no weight"), (80.0, 22.5, "12, class token at 8")]
    crowded += [(80.5, 21.5, "12, class token at 10"), (80.3, 20.7, "10 + 2 class attention")]
    crowded += [(80.8, 20.6, "12 + 2 class attention"), (80.7, 17.7, "b"), (80.4, 29.2, "c")]
    chart = scatter_chart([Point(*each) for each in crowded], x_label="x", y_label="y", named=True)
    frame_end = float(re.findall(r'H([\d.]+)V[\d.]+H[\d.]+Z" class="grid"', chart)[0])
    names = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="start">([^<]+)<', chart)
    assert all(float(x) + LETTER * len(name) <= frame_end + 8 for x, name in names)


def test_a_legend_tells_how_many_groups_it_leaves_out_and_colors_differ():
    chart = scatter_chart([Point(i, i, "", f"class {i}") for i in range(30)])
    assert re.search(r">6 [^<\d]+</text>", chart)
    shapes = re.findall(r'<(?:circle|path d="M[\d.]+ [\d.]+([^"]+)")[^>]*class="mark c(\d)"', chart)
    assert len(shapes) == 30 + 24  # points and legend
    assert len(set(shapes[:30])) == 30  # every further lap of the colors has another shape


def test_lines_may_start_at_zero_and_a_chart_may_be_a_file():
    lines = [Series("a", [(1, 50.0), (2, 60.0)])]
    assert ">0</text>" in line_chart(lines, x_label="layer", y_label="%", from_zero=True).rpartition("layer")[0]
    file = svg_file(line_chart(lines, x_label="layer", y_label="%"))
    assert file.startswith("<svg ")
    assert 'xmlns="http://www.w3.org/2000/svg"><style>' in file
    assert Tree.fromstring(file).tag == "{http://www.w3.org/2000/svg}svg"
