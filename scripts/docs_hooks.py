"""Hooks of the documentation site: the README as its first page, figures of the repository, tables of settings.

A page writes `<!-- settings module:Class -->` where the table of a class's settings belongs.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from envs_jax.base import load

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"(\]\()((?:\.\./)+)((?:bench|jaxrl|envs_jax|configs|tests)/[^)#]+)")  # links of pages in docs/
_BESIDE = re.compile(r"\]\(((?:bench/|[A-Z])[^)#:]+)\)")  # links of the README to files outside docs/


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and the files of the repository that pages link to."""
    readme = (ROOT / "README.md").read_text()
    linked = set(_BESIDE.findall(readme))
    for file in list(files.documentation_pages()):
        linked |= {path for _, _, path in _OUTSIDE.findall(Path(file.abs_src_path).read_text())}
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside docs/ stay inside the site, and fill in the tables."""
    markdown = _OUTSIDE.sub(lambda link: link[1] + link[2].removeprefix("../") + link[3], markdown)
    return re.sub(r"<!-- settings (\S+) -->", lambda mark: table(load(mark[1], "class")), markdown)


def table(cls: Any) -> str:
    """Return a Markdown table of a dataclass's settings: name, default, explanation with bounds."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        if "help" in field.metadata:
            low, high = field.metadata["between"] or (None, None)
            bounds = "" if low is None else f" ({low:g} to {high:g})"
            default = field.default if field.default != "" else "empty"
            rows.append(f"| `{field.name}` | {default} | {field.metadata['help']}{bounds} |")
    return "\n".join(rows)
