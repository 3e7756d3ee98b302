"""`patchloom app`: the served model with a page for people at /, and the report of its run at /report.

The page loads nothing from other servers: its content security policy lists the hashes of its own scripts and styles
and allows no other address. `hosts.py` keeps foreign pages from using the server through somebody's browser.
"""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from patchloom.report.page import ABOUT_LABEL_MAPS, ABOUT_MAPS, LIST_POLICY, inline_policy, page_script, render
from patchloom.report.pictures.overlays import class_color, palette
from patchloom.serving.app import App, Handler
from patchloom.serving.schema import page_paths
from patchloom_runtime.untrusted import open_plain, read_plain

_NO_MAP = "An artifact has no map of the evidence. The run it was exported from has one: patchloom app RUN."
_NO_CLASSES = (
    "This model has no classes of its own. Find similar images with an index: patchloom index RUN IMAGES --out INDEX"
)
HTML = "text/html; charset=utf-8"
REPORT = "report.html"
_REPORT_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {LIST_POLICY}; form-action 'none'; "
    "frame-ancestors 'none'"
)
_ISOLATION = {
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_POLICY = "the policy of this page"  # placeholder in the page until its hashes are known


class PageApp(App):
    """The application with a page."""

    report: str | None = None
    _page = Response()

    async def start(self) -> None:
        await super().start()
        limits = {"bytes": self.admission.limits.body_bytes, "pixels": self.admission.limits.pixels}
        self._page = page_response(
            self.name,
            self.processes.about | {"images": self.thumbnails is not None},
            where=f"this {'machine' if self.hosts.is_local else 'server'} only",
            has_report=self.report is not None,
            limits=limits,
        )

    def _handlers(self) -> dict[str, tuple[str, Handler]]:
        self.report = report_of(self.processes.source, self.processes.about.get("folder"))
        report: dict[str, tuple[str, Handler]] = {"/report": ("GET", self._show_report)} if self.report else {}
        return super()._handlers() | {"/": ("GET", self._show_page)} | report

    async def _show_page(self, _: Request) -> Response:
        return self._page

    async def _show_report(self, _: Request) -> Response:
        assert self.report is not None
        try:
            body = await asyncio.to_thread(read_plain, self.report, links=False)
        except OSError:
            reason = "the report no longer exists; write it with `patchloom report`"
            raise HTTPException(HTTPStatus.NOT_FOUND, reason) from None
        headers = {"Content-Security-Policy": _REPORT_POLICY, **_ISOLATION}
        return Response(body, headers=headers, media_type=HTML)

    def _openapi(self) -> dict[str, Any]:
        schema = super()._openapi()
        schema["paths"] |= page_paths(has_report=self.report is not None, keyed=self._key is not None)
        return schema


def report_of(source: str, folder: str | None) -> str | None:
    """Return the path of the report in the served folder, or in the index's run, if it is a regular file."""
    for parent in (source, folder) if folder else (source,):
        path = os.path.join(os.path.realpath(parent), REPORT)
        with suppress(OSError), open_plain(path, links=False):
            return path
    return None


def page_response(
    name: str, about: Mapping[str, Any], *, where: str, has_report: bool, limits: Mapping[str, int]
) -> Response:
    """Return the page of a model, with a policy that allows its own scripts and requests to this server only."""
    facts = _script_facts(about) | {"limits": limits}
    html = render(
        "app.html.j2",
        title=f"{about['network']} · {name}" if about["network"] and about["network"] != name else name,
        policy=_POLICY,
        verbs=about["verbs"],
        about=about,
        facts=_facts(about),
        where=where,
        promise=_invitation(about),
        legend=_legend(about),
        about_map=_about_map(about),
        hint="" if {"predict", "regress", "search"} & set(about["verbs"]) else _NO_CLASSES,
        has_report=has_report,
        described=Markup(json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")),
        script=Markup(page_script("picture_page.js") + page_script("app.js")),
    )
    hashes = {"script": "", "style": ""}
    for kind, text in _INLINE.findall(html):
        hashes[kind] += f" {inline_policy(text)}"
    policy = (
        f"default-src 'none'; script-src{hashes['script']}; style-src{hashes['style']}; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    html = html.replace(_POLICY, policy)
    headers = {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'", **_ISOLATION}
    return Response(html, headers=headers, media_type=HTML)


def _script_facts(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the model that the page's script needs."""
    facts: dict[str, Any] = {name: about[name] for name in ("verbs", "labels", "several", "levels", "level")}
    facts["about"] = ABOUT_LABEL_MAPS if about["several"] else ABOUT_MAPS
    if "segment" in about["verbs"]:
        facts["colours"] = palette(min(256, len(about["labels"]))).tolist()
    if "detect" in about["verbs"]:
        facts["colours"] = [class_color(number) for number in range(len(about["labels"]))]
    return facts


def _legend(about: Mapping[str, Any]) -> str:
    if "regress" in about["verbs"]:
        return "Numbers"
    if about["several"]:
        return "Labels that apply"
    return "Choose a class to see its evidence" if "explain" in about["verbs"] else "Most likely classes"


def _invitation(about: Mapping[str, Any]) -> str:
    """Return the text of the empty page."""
    verbs = about["verbs"]
    if "segment" in verbs or "detect" in verbs:
        return f"Choose an image to see {'the class of every pixel' if 'segment' in verbs else 'the objects in it'}."
    classes = "the labels that apply to it" if about["several"] else "its most likely classes"
    parts = [
        *(["its numbers"] if "regress" in verbs else []),
        *([classes] if "predict" in verbs else []),
        *(["the evidence for each of them"] if {"predict", "explain"} <= set(verbs) else []),
        *(["the most similar images of the index"] if "search" in verbs else []),
    ]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
    return f"Choose an image to see {listed or 'which parts its vector comes from'}."


def _about_map(about: Mapping[str, Any]) -> str:
    """Return the text in place of a map."""
    if "explain" in about["verbs"]:
        return ""
    if "regress" in about["verbs"]:
        return "" if about["is_artifact"] else "Maps of the numbers: patchloom look RUN IMAGE."
    return _NO_MAP if about["is_artifact"] else ABOUT_MAPS[""]


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if about["labels"] and ("predict" in about["verbs"] or "embed" not in about["verbs"]):
        facts.append(("labels" if about["several"] else "classes", f"{len(about['labels']):,}"))
    if "regress" in about["verbs"]:
        facts.append(("numbers", f"{len(about['labels']):,}"))
    if about["languages"]:
        facts.append(("languages", " → ".join(about["languages"])))
    if about["files"] is not None:
        facts.append(("images in the index", f"{about['files']:,}"))
    return facts
