"""Thumbnails of an index's files: of named folders alone, bounded, and made where the model does not wait for them."""

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchloom.serving.admission import Admission
from patchloom.serving.app import App
from patchloom.serving.endpoints import THUMBNAILS
from patchloom.serving.limits import Limits
from patchloom.serving.processes import ModelProcesses
from patchloom.serving.served_model import ServedVerb, thumbnail_verbs
from patchloom.serving.thumbnails import ThumbnailProcess, add_thumbnails, image_roots
from patchloom_runtime.errors import UsageError
from tests.serving.clients import LOOP, InThisProcess, ask, post
from tests.serving.conftest import GOLDEN, IMAGE_FILES


class Endless(ModelProcesses):
    """A process that makes thumbnails and never ends with the first."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__("", Admission(limits or Limits(queue=512)), say=str)
        self.taken = asyncio.Event()

    async def start(self) -> None:
        self.admission.processes = 1
        self.tasks = [asyncio.create_task(self._take())]

    async def _take(self) -> None:
        await self.admission.wait_for_request()
        self.taken.set()
        await asyncio.Event().wait()


def hits(*paths: str) -> list[dict[str, Any]]:
    return [{"hits": [{"path": path, "thumbnail": None} for path in paths], "level": "", "answers": []}]


def answers(inputs: list[Any], options: Any) -> list[Any]:
    return [hits("a.jpg")[0] for _ in inputs]


def app_of(thumbnails: ModelProcesses | None) -> App:
    about = {"task": "classification", "network": "", "labels": [], "languages": [], "files": 1}
    predict = {"predict": ServedVerb(lambda inputs, _: [{"answers": []} for _ in inputs])}
    return App(InThisProcess({"search": ServedVerb(answers)} | predict, about), "model", thumbnails=thumbnails)


def test_the_model_answers_while_thumbnails_are_made() -> None:
    thumbnails = Endless(Limits(queue=512, deadline_seconds=0.5))
    app = app_of(thumbnails)

    async def run() -> tuple[int, int]:
        await app.start()
        kind = {"content-type": "image/png"}
        slow = asyncio.create_task(ask(app, "POST", "/search", IMAGE_FILES[0], kind, "thumbnails=96"))
        await thumbnails.taken.wait()
        predicted = await ask(app, "POST", "/predict", IMAGE_FILES[0], kind)
        assert not slow.done()
        reply = await slow
        assert thumbnails.admission.waiting == 0
        for task in app.tasks:
            task.cancel()
        return predicted.status, reply.status

    assert LOOP.run_until_complete(run()) == (200, 504)


@pytest.mark.parametrize(
    ("inputs", "top", "side", "expected"),
    [
        (16, 1000, 512, 422),
        (16, 1000, 1, 422),
        (1, 257, 128, 422),
        (1, 17, 512, 422),
        (16, 1, 512, 200),
        (1, 256, 1, 200),
        (1, 12, 320, 200),  # what the page asks for
    ],
)
def test_the_thumbnails_of_one_answer_are_bounded(inputs: int, top: int, side: int, expected: int) -> None:
    app = app_of(None)
    images = [base64.b64encode(IMAGE_FILES[0]).decode()] * inputs
    reply = post(app, "/search", {"images": images, "top": top, "thumbnails": side})
    assert reply.status == expected
    if expected == 422:
        for fact in (inputs, top, side, "4,194,304"):
            assert str(fact) in reply.error
    assert post(app, "/search", {"images": images, "top": top}).status == 200


def small(roots: list[str], *paths: str) -> list[bool]:
    lines = [json.dumps(path) for path in paths]
    return [one is not None for one in thumbnail_verbs(roots)[THUMBNAILS].run(lines, {"side": 32})]


def test_only_files_in_the_named_folders_are_read(tmp_path: Path) -> None:
    root, private = tmp_path / "root", tmp_path / "private"
    for folder in (root / "inner", private, tmp_path / "rooted"):
        folder.mkdir(parents=True)
        Image.new("RGB", (40, 40), "red").save(folder / "a.png")
    (root / "out").symlink_to(private)
    (root / "out.png").symlink_to(private / "a.png")
    (root / "in.png").symlink_to(root / "inner" / "a.png")
    os.mkfifo(root / "pipe.png")
    (tmp_path / "alias").symlink_to(root)
    inside = ("inner/a.png", "in.png", f"{root}/inner/a.png", f"{tmp_path}/alias/inner/a.png", "inner/../inner/a.png")
    outside = (
        f"{private}/a.png",
        "../private/a.png",
        f"{root}/../private/a.png",
        f"{tmp_path}/rooted/a.png",
        "out/a.png",
        "out.png",
        "pipe.png",
        "inner",
        "",
        "gone.png",
        "a\0.png",
        "\ud800.png",
        "x" * 5000,
        "/proc/self/root" + str(private / "a.png"),
    )
    for folder in (str(root), str(tmp_path / "alias")):
        assert small([folder], *inside) == [True] * len(inside)
        assert small([folder], *outside) == [False] * len(outside)
    assert small([str(root), str(private)], "out.png", f"{private}/a.png") == [True, True]
    assert small([], *inside) == [False] * len(inside)


def test_a_link_that_appears_after_the_check_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("root/inner", "private"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / folder / "a.png")
    original = os.path.realpath

    def swapped(path: str) -> str:
        real = original(path)
        if real.endswith("a.png"):
            (tmp_path / "root" / "inner").rename(tmp_path / "root" / "other")
            (tmp_path / "root" / "inner").symlink_to(tmp_path / "private")
        return real

    monkeypatch.setattr(os.path, "realpath", swapped)
    assert small([str(tmp_path / "root")], "inner/a.png") == [False]
    assert (tmp_path / "root" / "inner").is_symlink()


def test_what_images_names_is_said() -> None:
    for source, folder, fact in (
        (GOLDEN / "classifier", GOLDEN, str(GOLDEN / "classifier")),
        (GOLDEN / "index", GOLDEN / "gone", str(GOLDEN / "gone")),
    ):
        with pytest.raises(UsageError) as error:
            image_roots(str(source), [str(folder)])
        assert fact in str(error.value)
    assert image_roots(str(GOLDEN / "index"), [str(GOLDEN / "pictures")]) == [str(GOLDEN / "pictures")]


def test_a_process_of_its_own(tmp_path: Path) -> None:
    paths = [str(GOLDEN / "pictures" / f"{number}.png") for number in range(3)]
    results = json.dumps(hits(*paths, str(tmp_path / "a.png"), *paths)).encode()
    process = ThumbnailProcess([str(GOLDEN / "pictures")], Limits(), say=str)

    async def run() -> Any:
        await process.start()
        try:
            began = asyncio.get_running_loop().time()
            os.kill(process.pids[0], 9)  # what it had is tried again in another
            return json.loads(await add_thumbnails(results, 32, process, began))
        finally:
            await process.stop()

    (one,) = LOOP.run_until_complete(run())
    made = [hit["thumbnail"] for hit in one["hits"]]
    assert [each is not None for each in made] == [True] * 3 + [False] + [True] * 3
    assert made[:3] == made[4:]
