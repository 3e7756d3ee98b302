"""Hooks of mkdocs for the documentation site (mkdocs.yml): generated pages, notebooks, and files outside docs/.

- The reference is made from the code (tools/reference.py).
- Every tutorial is also a notebook (tools/notebooks.py).
- A link to a file of the repository outside docs/ leads to a page with the contents of that file, so that the site
  works offline. A link to a file that does not exist is left alone, and the strict build fails on it.
"""

import os
import re
import sys
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import notebooks, reference  # noqa: E402

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".js": "javascript", ".css": "css"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, make in reference.PAGES.items():
        files.append(File.generated(config, name, content=make()))
    for page in [file for file in files if file.src_uri.startswith("tutorials/") and file.is_documentation_page()]:
        if not page.src_uri.endswith("/index.md"):
            name = page.src_uri.removesuffix(".md") + ".ipynb"
            files.append(File.generated(config, name, content=notebooks.notebook(page.content_string)))
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        for path in _outside(page.content_string, page.src_uri):
            if files.get_file_from_path(_page_of(path)) is None:
                added = File.generated(config, _page_of(path), content=_contents(path))
                files.append(added)
                waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at files outside docs/ to their pages, and add the link to a tutorial's notebook."""
    source = page.file.src_uri
    if source.startswith("tutorials/") and not source.endswith("/index.md"):
        name = Path(source).with_suffix(".ipynb").name
        title, rest = markdown.split("\n", 1)
        markdown = f"{title}\n\n[:material-download: This page as a notebook]({name}){{ .md-button }}\n{rest}"
        markdown = markdown.replace(":material-download: ", "")

    def replaced(link: re.Match[str]) -> str:
        path = _repository_path(link[2], source)
        if path is None:
            return link[0]
        target = relpath(_page_of(path), dirname(source) or ".")
        return f"[{link[1]}]({target}{link[3] or ''})"

    return LINK.sub(replaced, markdown)


def _outside(markdown: str, source: str) -> set[str]:
    paths = (_repository_path(link[2], source) for link in LINK.finditer(markdown))
    return {path for path in paths if path is not None}


def _repository_path(target: str, source: str) -> str | None:
    """Return the path in the repository of a link target outside docs/, or None."""
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    if source.startswith("source/"):  # a page made from a file outside docs/: its links are relative to that file
        base = dirname(source.removeprefix("source/"))
        path = normpath(os.path.join(base, target))
    else:
        path = normpath(os.path.join("docs", dirname(source), target))
    if path.startswith("docs/"):
        return None if not source.startswith("source/") else path
    return path if (ROOT / path).exists() else None


def _page_of(path: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _contents(path: str) -> str:
    file = ROOT / path
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if not each.name.startswith((".", "__")))
        listed = [f"- [{name}]({name})" if (file / name).is_file() else f"- {name}/" for name in names]
        return f"# {path}\n\n" + "\n".join(listed) + "\n"
    text = file.read_text("utf-8")
    if path.endswith(".md"):
        return text
    fence = "`" * (3 + max((len(run) for run in re.findall(r"`{3,}", text)), default=0))
    return f"# {path}\n\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text}\n{fence}\n"
