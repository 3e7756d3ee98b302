"""`patchloom app`: the served model with a page at / for a person, and the report of its run at /report.

The page asks this server alone: its policy names the scripts and the style that it holds by their hashes, and allows no
other address. `hosts.py` keeps pages of strangers from asking through somebody's browser.
"""

import asyncio
import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from markupsafe import Markup

from patchloom.report.page import ABOUT_MAPS, page_script, render
from patchloom.serving.app import App
from patchloom.serving.exchange import Exchange, Response
from patchloom.serving.refusals import Refused
from patchloom.serving.schema import page_paths
from patchloom_runtime.untrusted import open_plain, read_plain

_NO_MAP = (
    "An artefact gives no map of where the model looked; the run that it was exported from does: patchloom app RUN."
)
_NO_CLASSES = (
    "This model names no classes by itself. An index finds pictures by it: patchloom index RUN IMAGES --out INDEX"
)
HTML = "text/html; charset=utf-8"
REPORT = "report.html"
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; frame-ancestors 'none'"
)
_CLOSED = {
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_POLICY = "the policy of this page"  # stands in the page until its hashes are known


class PageApp(App):
    """The application with a page."""

    report: str | None = None
    _page = Response()

    async def start(self) -> None:
        """Load the model, write the page of what it does, and open the routes."""
        await super().start()
        about = self.processes.about | {"images": self.thumbnails is not None}
        self.report = report_of(self.processes.source, about.get("folder"))
        limits = {"bytes": self.admission.limits.body_bytes, "pixels": self.admission.limits.pixels}
        where = f"this {'machine' if self.hosts.is_local else 'server'} alone"
        has_report = self.report is not None
        self._page = page_response(self.name, about, where=where, has_report=has_report, limits=limits)
        self._routes["/"] = {"GET": self._show_page}
        if self.report is not None:
            self._routes["/report"] = {"GET": self._show_report}

    async def _show_page(self, _: Exchange) -> Response:
        return self._page

    async def _show_report(self, _: Exchange) -> Response:
        assert self.report is not None
        try:
            body = await asyncio.to_thread(read_plain, self.report, links=False)
        except OSError:
            raise Refused(HTTPStatus.NOT_FOUND, "the report is no longer there; `patchloom report` writes it") from None
        return Response(body=body, kind=HTML, headers={"Content-Security-Policy": _REPORT_POLICY, **_CLOSED})

    def _described(self) -> dict[str, Any]:
        schema = super()._described()
        schema["paths"] |= page_paths(has_report=self.report is not None, keyed=self._key is not None)
        return schema


def report_of(source: str, folder: str | None) -> str | None:
    """The report of the run that is served, or of the run of the index, if it is a plain file of that folder."""
    for place in (source, folder) if folder else (source,):
        path = os.path.join(os.path.realpath(place), REPORT)
        with suppress(OSError), open_plain(path, links=False):
            return path
    return None


def page_response(
    name: str, about: Mapping[str, Any], *, where: str, has_report: bool, limits: Mapping[str, int]
) -> Response:
    """The page of a model, with the policy that lets its own scripts run and ask this server alone."""
    told = _told(about) | {"limits": limits}
    html = render(
        "app.html.j2",
        title=f"{about['network']} · {name}" if about["network"] and about["network"] != name else name,
        policy=_POLICY,
        verbs=about["verbs"],
        about=about,
        facts=_facts(about),
        where=where,
        promise=_promise(about),
        legend="Choose a class to see its evidence" if "explain" in about["verbs"] else "Most likely classes",
        about_map=_about_map(about),
        hint="" if {"predict", "search"} & set(about["verbs"]) else _NO_CLASSES,
        has_report=has_report,
        described=Markup(json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")),
        script=Markup(page_script("picture_page.js") + page_script("app.js")),
    )
    own = {"script": "", "style": ""}
    for kind, text in _INLINE.findall(html):
        own[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    policy = (
        f"default-src 'none'; script-src{own['script']}; style-src{own['style']}; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    html = html.replace(_POLICY, policy)
    headers = {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'", **_CLOSED}
    return Response(body=html.encode(), kind=HTML, headers=headers)


def _told(about: Mapping[str, Any]) -> dict[str, Any]:
    """All that the script knows of the model."""
    told: dict[str, Any] = {name: about[name] for name in ("verbs", "labels", "levels", "level")}
    told["about"] = ABOUT_MAPS
    if "segment" in about["verbs"]:
        from patchloom.report.pictures.overlays import palette

        told["colours"] = palette(min(256, len(about["labels"]))).tolist()
    if "detect" in about["verbs"]:
        from patchloom.report.pictures.overlays import class_color

        told["colours"] = [class_color(number) for number in range(len(about["labels"]))]
    return told


def _promise(about: Mapping[str, Any]) -> str:
    """What a person will see, said where nothing is yet."""
    verbs = about["verbs"]
    if "segment" in verbs or "detect" in verbs:
        told = "the class of every pixel" if "segment" in verbs else "the objects in it"
        return f"Give a picture to see {told}."
    parts = [
        *(["its likeliest classes"] if "predict" in verbs else []),
        *(["what speaks for each of them"] if {"predict", "explain"} <= set(verbs) else []),
        *(["the pictures of the index that are most like it"] if "search" in verbs else []),
    ]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
    return f"Give a picture to see {listed or 'what its vector is made of'}."


def _about_map(about: Mapping[str, Any]) -> str:
    """What is said of the map until there is one, or where there is none."""
    if "explain" in about["verbs"]:
        return ""
    return _NO_MAP if about["is_artifact"] else ABOUT_MAPS[""]


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if about["labels"] and ("predict" in about["verbs"] or "embed" not in about["verbs"]):
        facts.append(("classes", f"{len(about['labels']):,}"))
    if about["languages"]:
        facts.append(("languages", " → ".join(about["languages"])))
    if about["files"] is not None:
        facts.append(("pictures in the index", f"{about['files']:,}"))
    return facts
