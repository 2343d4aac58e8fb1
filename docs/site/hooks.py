"""What mkdocs does to the pages of the repository, so that they read the same there and in a checkout.

- A page for each row of the table of algorithms stands in the navigation without being listed by hand.
- SECURITY.md and CHANGELOG.md, which stand in the repository's root, are pages of the site.
- Links to source files, which the site does not hold, become their names.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
MOVED = {"SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
"""Files of the root and what they are called in the site."""


def on_config(config: Any) -> Any:
    """Fill the algorithms into the navigation."""
    rows = yaml.safe_load((ROOT / "docs/algorithms/notes.yaml").read_text(encoding="utf-8"))

    def filled(entry: Any) -> Any:
        if isinstance(entry, list):
            return [filled(one) for one in entry]
        if isinstance(entry, dict):
            return {title: filled(inside) for title, inside in entry.items()}
        return [f"algorithms/{name}.md" for name in rows] if entry == "ALGORITHMS" else entry

    config["nav"] = filled(config["nav"])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages."""
    for name, page in MOVED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)
        for other, moved in MOVED.items():
            text = text.replace(f"]({other})", f"]({moved})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that leave docs/; fences in the documentation carry `file=NAME`, which becomes a title."""

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        inside = os.path.normpath(os.path.join("docs", os.path.dirname(page.file.src_path), target))
        if inside in MOVED:
            return f"[{text}]({MOVED[inside]})"
        return text if text.startswith("`") else f"{text} (`{inside}`)"

    markdown = re.sub(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)", link, markdown)
    return re.sub(r"^```(\w+) file=(\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Names that the theme leaves out, for readers who hear the page; wide blocks can be reached by keyboard.

    The theme would fetch what searching needs in a page that was opened from a file; it lies beside the page instead.
    """
    here = "../" * page.url.count("/")
    output = output.replace('src="https://unpkg.com/iframe-worker/shim"', f'src="{here}site/vendor/iframe-worker.js"')
    output = output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
    return output.replace("<pre><span></span><code>", '<pre tabindex="0"><span></span><code>')


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for the page of addresses that do not exist, which stands at the root."""
    return output_content.replace('src="https://unpkg.com/iframe-worker/shim"', 'src="/site/vendor/iframe-worker.js"')
