"""What mkdocs does not do by itself: show files of the repository that lie outside this folder.

Some are pages of the site (``PAGES``). A line that is nothing but a link to a section of another file, such as
``[Run it](../README.md#run-it)``, is replaced by that section. Links are those of the repository, so that they work
there too: one to a page leads to the page, an image comes along, and the name of any other file is shown as it is.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = Path(__file__).parent.name
PAGES = {
    "README.md": "index.md",
    "LOG.md": "log.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/kernels/README.md": "speed.md",
    "benchmarks/trl/README.md": "cost.md",
    "benchmarks/verl/README.md": "cost-verl.md",
    "examples/tasks/README.md": "tasks.md",
    "examples/trl/README.md": "examples-trl.md",
    "examples/verl/README.md": "examples-verl.md",
    "src/troll/projection/README.md": "derivation.md",
}
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_SECTION = re.compile(r"^\[[^\]]+\]\((\.\./[^)#]+\.md)#([^)]+)\)$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere in the repository."""
    for origin, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(ROOT / origin).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put in sections of other files, and turn links of the repository into those of the site."""
    here = page.file.src_uri
    origin = next((o for o, p in PAGES.items() if p == here and page.file.generated_by), f"{DOCS}/{here}")

    def section(match: re.Match[str]) -> str:
        other = _resolve(origin, match[1])
        return _links(_section(other, match[2]), other, config, files)

    return _links(_SECTION.sub(section, markdown), origin, config, files)


def _section(path: str, anchor: str) -> str:
    """The text between a heading and the next one."""
    text = (ROOT / path).read_text(encoding="utf-8")
    code = [match.span() for match in _CODE.finditer(text)]
    headings = [m for m in _HEADING.finditer(text) if not any(a <= m.start() < b for a, b in code)]
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        if slugify(heading[1], "-") == anchor:
            return text[heading.end() : following.start() if following else None].strip()
    raise PluginError(f"{path} has no section #{anchor}")


def _links(markdown: str, origin: str, config: Any, files: Files) -> str:
    """The links of a text that stands in ``origin``, as links of the site; code is left as it is."""

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = _resolve(origin, target)
        inside = PAGES.get(path) or PAGES.get(f"{path}/README.md")
        if ":" in target or not (ROOT / path).exists():
            return match[0]  # another site; or a page of this one; or nothing, which mkdocs will say
        if path.startswith(f"{DOCS}/"):
            return f"{image}[{text}]({path.removeprefix(f'{DOCS}/')}{anchor})"
        if inside:
            return f"{image}[{text}]({inside}{anchor})"
        if image:
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
            return f"![{text}]({path})"
        return text if path.endswith(text.strip("`")) else f"{text}: `{path}`"

    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def _resolve(origin: str, target: str) -> str:
    """Where a link of the file ``origin`` leads, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
