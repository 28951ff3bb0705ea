"""MkDocs hooks: files of the repository outside ``docs/`` as pages of the site.

The Markdown links of the repository work in a plain file viewer. On the site, a link to a file in ``PAGES`` leads to
its page, an image outside ``docs/`` is copied, and a link to any other file becomes the path of that file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = Path(__file__).parent.name
PAGES = {
    "LOG.md": "log.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/kernels/README.md": "speed.md",
    "benchmarks/trl/README.md": "cost.md",
    "benchmarks/verl/README.md": "cost-verl.md",
    "examples/trl/README.md": "examples-trl.md",
    "examples/verl/README.md": "examples-verl.md",
    "experiments/README.md": "experiments.md",
    "experiments/studies/tables.md": "study-tables.md",
    "src/troll/projection/README.md": "derivation.md",
}
"""Path in the repository → page that is generated from it."""
INSTEAD = {"README.md": "index.md", "examples/tasks/README.md": "tasks.md"}
"""Path in the repository → page of ``docs/`` that takes its place on the site."""
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]+)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for origin, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Translate the links of the repository into links of the site."""
    here = page.file.src_uri
    origin = next((path for path, generated in PAGES.items() if generated == here), f"{DOCS}/{here}")
    return _translate(markdown, origin, config, files)


def _translate(markdown: str, origin: str, config: Any, files: Files) -> str:
    """The Markdown of the file ``origin`` with links of the site; code blocks stay unchanged."""

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if ":" in target or not (ROOT / path).exists():
            return match[0]  # another site, or a dead link, which MkDocs reports
        if path.startswith(f"{DOCS}/"):
            return f"{image}[{text}]({path.removeprefix(f'{DOCS}/')}{anchor})"
        if image:
            if files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
            return f"![{text}]({path})"
        pages = PAGES | INSTEAD
        if page := pages.get(path) or pages.get(f"{path}/README.md"):
            return f"[{text}]({page}{anchor})"
        return text if path.endswith(text.strip("`")) else f"{text}: `{path}`"

    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)
