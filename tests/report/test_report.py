"""The report: a single file, well-formed and escaped, with charts exact to the pixel."""

import base64
import io
import math
import re
from html import escape
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import Markup
from PIL import Image

from patchloom.evaluation.classification import Mistake
from patchloom.models.cost import Cost, cost_rows
from patchloom.recipes.auto import auto_recipe
from patchloom.recipes.schema import flatten, override
from patchloom.report import run_report as module
from patchloom.report import sections as sections_module
from patchloom.report.charts import Series, bars, line_chart
from patchloom.report.charts.svg import (
    BOTTOM,
    DARK_COLORS,
    HEIGHT,
    LEFT,
    LIGHT_COLORS,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    nice_ticks,
)
from patchloom.report.page import inline_policy
from patchloom.report.run_report import Report, Summary, recipe_rows, validation, write_report
from patchloom.report.sections import class_section, confusion_section, mistake_section, picture_section
from patchloom_runtime.errors import ResourceError

VOID = {"meta", "img", "br", "wbr"}
EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """A parser that checks that tags are closed and records their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += f"{data} "

    def ids(self) -> list[str]:
        return [of["id"] for tag, of in self.tags if tag == "section"]


def record(step, epoch, kind, weights="model", **values):
    return {"step": step, "epoch": epoch, "kind": kind, "weights": weights, "values": values, "time": {}}


RECORDS = [
    record(5, 0, "train", loss=2.0, lr=0.1),
    record(10, 0, "train", loss=1.0, lr=0.2),
    record(10, 1, "evaluation", top1=50.0, loss=1.5),
    record(10, 1, "evaluation", "ema", top1=40.0, loss=1.6),
    record(20, 1, "train", loss=0.5, lr=0.1),
    record(20, 2, "evaluation", top1=80.0, loss=0.7),
]


WHY = {"optim.lr": "user"}
CHARTS = {**module.LOSS, "Validation top-1, %": validation("top1"), **module.RATE}


def write_all(path, **changes):
    recipe, reasons = auto_recipe(images=1437, classes=3, image_size_median=8)
    contents = {
        "title": f"title {EVIL}",
        "summary": Summary(
            model="resmlp_s12",
            data=f"data {EVIL}",
            best="91.24 %",
            measure="best top-1",
            weights="ema",
            epochs=30,
            seconds=3725.0,
            command=f"patchloom train {EVIL}",
            next_command="patchloom export runs/1",
        ),
        "records": RECORDS,
        "charts": {"Validation top-1, %": validation("top1")},
        "confusion": np.array([[8, 2, 0], [0, 5, 0], [1, 0, 4]]),
        "class_names": ["cat", EVIL, "dog"],
        "per_class": [80.0, 100.0, math.nan],
        "mistakes": [
            (Image.new("L", (8, 8), 7), Mistake(3, 0, 1, 0.987), "photos/cat/07.jpg"),
            (Image.new("RGB", (500, 250)), Mistake(9, 2, 0, 0.5), EVIL),
        ],
        "pictures": [(EVIL, Image.new("RGB", (30, 20), "red"), EVIL), ("chart", Markup("<svg></svg>"), "")],
        "recipe": [*recipe_rows(recipe, why(reasons) | WHY), ("objective.teacher", EVIL, EVIL)],
        "cost": cost_rows(Cost(1234567, 3_010_000_000, 5_000_000)),
        "notes": [f"left out {EVIL}", "see https://example.org"],
    }
    contents |= changes
    names, counts = contents.pop("class_names"), contents.pop("confusion")
    sections = [confusion_section(counts, names)]
    if (per_class := contents.pop("per_class")) is not None:
        sections.append(class_section(per_class, names, counts))
    if mistakes := contents.pop("mistakes"):
        sections.append(mistake_section(mistakes, names))
    if pictures := contents.pop("pictures"):
        sections.append(picture_section(pictures))
    write_report(path, Report(**contents, sections=sections))
    return path.read_text("utf-8")


def why(reasons):
    return {reason.field: f"auto: {reason.why}" for reason in reasons}


@pytest.fixture
def html(tmp_path):
    return write_all(tmp_path / "report.html")


def images_of(html: str) -> list[Image.Image]:
    addresses = [of["src"] for tag, of in Page(html).tags if tag == "img"]
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    return [Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2], validate=True))) for address in addresses]


def test_the_page_has_every_section_and_closes_every_tag(html):
    page = Page(html)
    assert page.ids() == [
        "summary", "notes", "curves", "confusion", "classes", "mistakes", "pictures", "recipe", "cost", "environment",
    ]  # fmt: skip
    for words in (
        "91.24 %", "EMA weights", "1:02:05", "patchloom export runs/1", "98.7 %", "07.jpg",
        "1.2 M", "3.01 G", "4.7 MiB", "no images", "80.0 % of 10",
    ):  # fmt: skip
        assert words in page.words


def test_nothing_comes_from_elsewhere(html):
    for tag, of in Page(html).tags:
        assert tag not in ("link", "iframe", "object", "base", "form")
        for name, value in of.items():
            assert not name.startswith("on")
            if name in ("src", "href", "action", "poster", "srcset", "xlink:href"):
                assert value.startswith(("data:image/png", "#"))
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert f"script-src {inline_policy(script)}" in html  # its own script, and no other


def test_user_text_is_escaped(html):
    assert html.count("<script") == 1
    assert "&amp;lt;" not in html
    assert f"<title>title {escape(EVIL)}</title>" in html
    parts = {part[:20].partition('"')[0]: part for part in html.split('<section id="')[1:]}
    for name in ("summary", "notes", "confusion", "classes", "mistakes", "pictures", "recipe"):
        assert escape(EVIL, quote=False) in parts[name], name


def test_images_decode_and_tiny_ones_are_enlarged_without_blur(html):
    tiny, large, picture = images_of(html)
    assert tiny.size == (112, 112)
    assert tiny.convert("RGB").getcolors() == [(112 * 112, (7, 7, 7))]
    assert large.size == (224, 112)
    assert picture.size == (30, 20)
    assert picture.convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_missing_contents_have_no_section(tmp_path):
    write_report(tmp_path / "r.html", Report(title="t", summary=Summary(model="m", data="d")))
    page = Page((tmp_path / "r.html").read_text("utf-8"))
    assert page.ids() == ["summary", "environment"]
    assert "top-1" not in page.words


def test_a_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_):
        raise OSError(5, "broken disk")

    monkeypatch.setattr("patchloom.disk.os.replace", fail)
    with pytest.raises(ResourceError) as error:
        write_all(path)
    assert str(path) in str(error.value)
    assert "broken disk" in str(error.value)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def chart_points(svg: str, color: int) -> list[tuple[float, float]]:
    return [
        (float(x), float(y))
        for x, y in re.findall(rf'<circle cx="([\d.]*)" cy="([\d.]*)" r="4" class="c{color}[ "]', svg)
    ]


def test_records_become_points_in_epochs():
    charts = dict(module.curve_charts(RECORDS, CHARTS))
    assert list(charts) == list(CHARTS)
    loss, top1, rate = charts.values()
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    half = LEFT + (right - LEFT) / 2  # epoch 1 of 2
    # Losses from 0.5 to 2 stand on an axis from 0.5 to 2, in steps of 0.5.
    points = chart_points(loss, 0)
    assert points[0] == (LEFT + (right - LEFT) / 4, TOP)
    assert points[1] == (half, pytest.approx(bottom - (bottom - TOP) / 3, abs=0.005))
    assert points[2] == (right, bottom)
    assert chart_points(top1, 1) == [
        (half, pytest.approx(bottom - (bottom - TOP) / 4, abs=0.005)),
        (right, TOP),
    ]
    assert chart_points(top1, 2) == [(half, bottom)]
    assert len(chart_points(rate, 0)) == 3


def test_records_without_an_evaluation_are_counted_in_steps():
    charts = dict(module.curve_charts([record(4, 0, "train", loss=1.0), record(8, 0, "train", loss=2.0)], CHARTS))
    assert list(charts) == ["Loss"]
    assert "step 4" in charts["Loss"]
    assert module.curve_charts([{"kind": "train"}, {}], CHARTS) == []


def test_a_part_of_an_epoch_does_not_stretch_the_axis():
    cut = [*RECORDS, record(25, 2, "evaluation", top1=81.0)]
    assert module.steps_per_unit(cut) == ("epoch", 10.0)


def test_lines_break_where_a_value_is_missing():
    svg = line_chart(
        [Series("loss", [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, 2.0)])], x_label="epoch", y_label="loss"
    )
    path = re.search(r'<path d="([^"]*)" class="c0"/>', svg)[1]
    assert re.sub(r"[\d. ]", "", path) == "MLML"
    assert svg.count("<circle") == 4
    assert "nan" not in svg
    null = dict(module.curve_charts([record(1, 0, "train", loss=1.0), record(2, 0, "train", loss=None)], CHARTS))
    assert null["Loss"].count("<circle") == 1


def test_a_chart_of_nothing_finite_says_so():
    chart = line_chart([Series("loss", [(0, math.nan), (1, math.inf)])], x_label="epoch", y_label="loss")
    assert "<svg" not in chart
    assert re.fullmatch(r'<p class="muted">.+</p>', chart)


def test_long_curves_are_averaged_not_cut():
    points = [(float(i), float(i % 2)) for i in range(1000)]
    thin = module._averaged(points)
    assert len(thin) == 250
    assert {y for _, y in thin} == {0.5}
    assert thin[-1][0] == 999.0
    assert module._averaged(points[:300]) == points[:300]


def test_an_axis_maps_its_ends_and_its_middle():
    axis = Axis(10, 30, 100, 0)
    assert [axis(value) for value in (10, 20, 30)] == [100, 50, 0]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 30, [0, 10, 20, 30]),
        (0.05, 2.3, [0, 0.5, 1, 1.5, 2, 2.5]),
        (10, 98, [0, 20, 40, 60, 80, 100]),
        (-0.3, 0.3, [-0.4, -0.2, 0, 0.2, 0.4]),
        (0, 0.003, [0, 0.001, 0.002, 0.003]),
        (5, 5, [4, 5]),
        (100, 100, [80, 100]),
        (0, 0, [0, 0.2]),
    ],
)
def test_ticks_are_round_and_reach_around_the_values(low, high, expected):
    assert nice_ticks(low, high) == expected


def test_a_bar_is_as_long_as_its_value():
    drawn = bars([("a", 25.0, "x"), ("b", math.nan, "x"), ("c", 100.0, "x")])
    assert re.findall(r"width:([\d.]+)%", drawn) == ["25", "0", "100"]


def test_a_long_class_name_is_not_cut():
    name = "a class with a name of more letters than a chart has room for"
    assert name in bars([(name, 25.0, "x")])


def test_classes_are_worst_first_and_fold_after_twenty():
    names = [f"class{i:02}" for i in range(27)]
    accuracy = [math.nan, *(float(100 - i) for i in range(1, 27))]
    first, folded, count = sections_module._class_bars(accuracy, names, None)
    order = re.findall(r"<span>(class\d\d)", first + folded)
    assert order == [*reversed(names[1:]), names[0]]
    assert (first.count("class"), count) == (21, 7)  # one is the chart's own


def test_the_color_of_a_cell():
    strength = sections_module._strengths(np.array([[8, 2, 0], [0, 0, 0], [1, 0, 9]]))
    assert strength.tolist() == pytest.approx(np.array([[0.8, 1.0, 0], [0, 0, 0], [0.5, 0, 0.9]]))
    assert sections_module._strengths(np.eye(2)).tolist() == [[1, 0], [0, 1]]


def test_few_classes_are_counted_in_cells(html):
    heat = html[html.index('class="matrix"') : html.index('<section id="classes">')]
    assert [int(n) for n in re.findall(r">(\d+)</td>", heat)] == [8, 2, 5, 1, 4]
    assert "cat → dog" not in heat
    assert "dog → cat: 1 of 5" in heat
    words = re.sub(r"\s+", " ", Page(html).words)
    assert len(re.findall(r"\bcat [^<()]*<script>alert\(1\)</script> \(2 \w+ 10\)", words)) == 1


@pytest.mark.parametrize(("classes", "names_written"), [(40, True), (120, False)])
def test_many_classes_are_a_map_that_tells_its_cells_with_the_worst_block_enlarged(tmp_path, classes, names_written):
    names = [f"class{i}" for i in range(classes)]
    counts = np.diag(np.full(classes, 10))
    counts[3, 17] = 5
    counts[30, 2] = 2
    html = write_all(tmp_path / "r.html", confusion=counts, class_names=names, per_class=None, mistakes=[], pictures=[])
    table = html[html.index('<table class="confused"') :].partition("</table>")[0]
    assert re.findall(r"class\d+|[\d.]+ %", table) == ["class3", "class17", "33.3 %", "class30", "class2", "16.7 %"]
    block, _, whole = html[html.index('class="matrix"') :].partition('<figure class="charts">')
    assert re.findall(r'scope="row" title="\w+">(\w+)<', block) == ["class3", "class17", "class2", "class30"]
    assert [int(n) for n in re.findall(r">(\d+)</td>", block)] == [10, 5, 10, 10, 2, 10]
    assert "class30 → class2: 2 of 12" in whole
    assert whole.count("<title>") == classes + 2
    assert "class38</text>" in whole
    assert ("class39</text>" in whole) == names_written  # thin rows are named at intervals


def test_very_many_classes_are_added_up_to_blocks(tmp_path):
    names = [f"class{i}" for i in range(300)]
    counts = np.diag(np.full(300, 10))
    counts[3, 17] = 5
    counts[7, 8] = 2
    html = write_all(tmp_path / "r.html", confusion=counts, class_names=names, per_class=None, mistakes=[], pictures=[])
    whole = html.partition('<figure class="charts">')[2].partition("</svg>")[0]
    cells = re.findall(r'<g class="(right|wrong)"><title>([^<]*)</title>', whole)
    assert sum(kind == "right" for kind, _ in cells) == 50
    wrong = [re.findall(r"class\d+|\b\d+\b", text) for kind, text in cells if kind == "wrong"]
    assert wrong == [
        ["class0", "class5", "class12", "class17", "5", "65"],
        ["class6", "class11", "class6", "class11", "2", "62"],
    ]
    (block,) = [text for kind, text in cells if kind == "right" and text.startswith("class6 ")]
    assert re.findall(r"\b\d+\b", block) == ["60", "62", "2"]
    assert "class294</text>" in whole


# Linear RGB as people without one kind of cone see it (Machado et al. 2009, severity 1).
SIMULATIONS = {
    "trichromat": np.eye(3),
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_CONES = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.2119035, 0.68069955, 0.10739696],
    [0.08830246, 0.28171884, 0.6299787],
]
TO_LAB = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.9779985, -2.42859221, 0.45059371],
    [0.02590404, 0.78277177, -0.80867577],
]


def linear(colors):
    share = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in colors]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize(("colors", "page"), [(LIGHT_COLORS, "#ffffff"), (DARK_COLORS, "#181e27")])
@pytest.mark.parametrize("eyes", SIMULATIONS)
def test_line_colors_differ_for_everybody(eyes, colors, page):
    seen = np.clip(linear(colors) @ np.transpose(SIMULATIONS[eyes]), 0, 1)
    lab = np.cbrt(seen @ np.transpose(TO_CONES)) @ np.transpose(TO_LAB)
    distances = np.linalg.norm(lab[:, None] - lab, axis=-1)
    assert distances[np.triu_indices(len(colors), 1)].min() > 0.1  # OKLab; 0.02 is just noticeable
    luminance = linear([*colors, page]) @ [0.2126, 0.7152, 0.0722] + 0.05
    contrast = np.maximum(luminance[:-1] / luminance[-1], luminance[-1] / luminance[:-1])
    assert contrast.min() >= 3  # WCAG 1.4.11


def test_no_mistakes_have_no_scale(tmp_path):
    html = write_all(tmp_path / "r.html", confusion=np.diag([3, 3, 3]), mistakes=[])
    confusion = html[html.index('<section id="confusion">') :].partition("</section>")[0]
    assert confusion.count("<p") == 1  # how to read it; no line of what is most often wrong
    assert "%" not in confusion.rpartition("<p")[2]


def test_recipe_rows_say_where_each_value_comes_from():
    recipe, reasons = auto_recipe(images=1437, classes=10, image_size_median=8)
    recipe = override(recipe, {"optim.lr": 0.5, "schedule.epochs": 7})
    rows = {key: (value, reason) for key, value, reason in recipe_rows(recipe, why(reasons) | WHY)}
    assert list(rows) == list(flatten(recipe))
    assert rows["optim.lr"] == (0.5, "user")
    assert rows["optim.momentum"] == (0.9, "default")
    size = next(reason for reason in reasons if reason.field == "model.image_size")
    assert rows["model.image_size"] == (size.value, f"auto: {size.why}")
    published = {key: reason for key, _, reason in recipe_rows(recipe, {})}
    assert published["schedule.epochs"] == "recipe auto"
    assert published["optim.momentum"] == "default"


def test_settings_are_grouped_and_defaults_folded(html):
    recipe = html[html.index('<section id="recipe">') : html.index('<section id="cost">')]
    chosen, _, defaults = recipe.partition("<details>")
    groups = re.findall(r'rowgroup">(\w+)<', chosen)
    assert groups == [
        name for name in ("run", "model", "augment", "objective", "optim", "schedule", "test") if name in groups
    ]
    assert re.search(r"<td>lr</td><td><code>[\d.]+</code></td><td class=\"why\">user</td>", chosen)
    assert 'class="why">default<' not in chosen
    assert set(re.findall(r'class="why">(.*?)<', defaults)) == {"default"}


def test_a_long_legend_takes_further_lines_and_pushes_the_chart_down():
    few = line_chart([Series("a", [(0, 0), (1, 1)]), Series("b", [(0, 0), (1, 1)], 1)], x_label="epoch", y_label="loss")
    assert f'viewBox="0 0 {WIDTH} {HEIGHT}"' in few
    many = [Series(f"a run with number {i}", [(0, 0), (1, 1)], i) for i in range(5)]
    chart = line_chart(many, x_label="epoch", y_label="loss")
    lines = re.findall(r'<path d="M([\d.]+) (\d+)h20"', chart)
    assert [int(y) for _, y in lines] == [11, 11, 27, 27, 43]
    assert f'viewBox="0 0 {WIDTH} {HEIGHT + 32}"' in chart
    highest = max(y for _, y in chart_points(chart, 0))
    assert highest == HEIGHT - BOTTOM + 32


@pytest.mark.parametrize(
    ("weights", "text"), [("model", ""), ("ema", ", EMA weights"), ("average", ", average of epochs")]
)
def test_the_summary_names_averaged_weights(tmp_path, weights, text):
    summary = Summary(model="resmlp_s12", data="digits", best="91.24 %", measure="best top-1", weights=weights)
    assert f"<dt>best top-1{text}</dt>" in write_all(tmp_path / "r.html", summary=summary)
