"""Hooks of the documentation site: README and notebooks as pages, figures of the repository, tables of settings.

A page writes `<!-- settings module:Class -->` where the table of a class's settings belongs, and
`<!-- names: SYSTEM -->` where the names of a published system and ours belong.
"""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from envs_jax.base import load
from jaxrl.integrations import published

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"(\]\()((?:\.\./)+)((?:bench|jaxrl|envs_jax|configs|tests)/[^)#]+)")  # links of pages in docs/
NOTEBOOK = "bench/results/README.md"
_IN_RESULTS = re.compile(r"\]\(([\w.-]+)\)")  # links of the notebook behind the results
_BESIDE = re.compile(r"\]\(((?:bench/|[A-Z])[^)#:]+)\)")  # links of the README to files outside docs/


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and the files of the repository that pages link to."""
    readme = (ROOT / "README.md").read_text()
    linked = set(_BESIDE.findall(readme + (ROOT / "CONTRIBUTING.md").read_text()))
    for file in list(files.documentation_pages()):
        linked |= {path for _, _, path in _OUTSIDE.findall(Path(file.abs_src_path).read_text())}
    linked |= {f"bench/results/{name}" for name in _IN_RESULTS.findall((ROOT / NOTEBOOK).read_text())}
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=show_notebook(path)))
    return files


def show_notebook(path: Path) -> str:
    """Return a Jupyter notebook as Markdown, with a link to its file."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
    texts = [f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells]
    return "\n\n".join([*texts, f"[The notebook]({path.name})"])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files outside docs/ stay inside the site, and fill in the tables."""
    if page.file.src_uri in (NOTEBOOK, "CONTRIBUTING.md"):
        markdown = markdown.replace("](../../docs/", "](../../").replace("](docs/", "](")
    markdown = re.sub(r"(\]\([^)]*notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)  # a page instead of JSON
    markdown = _OUTSIDE.sub(lambda link: link[1] + link[2].removeprefix("../") + link[3], markdown)
    markdown = markdown.replace(" ± ", "\u00a0±\u00a0")  # a value and its interval stay in one line
    systems = {system.name: system for system in published.SYSTEMS}
    markdown = re.sub(r"<!-- names: ([^>]+) -->", lambda mark: show_names(systems[mark[1]]), markdown)
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


def show_names(system: published.System) -> str:
    """Return a Markdown table of a published system's settings: their name, ours, the conversion."""
    rows = ["| theirs | here | note |", "|---|---|---|"]
    others = [name for name in system.names if name.flag != name.ours]
    for (ours, note), group in itertools.groupby(others, lambda name: (name.ours, name.note)):
        theirs = ", ".join(f"`{name.theirs}`" for name in group)
        rows.append(f"| {theirs} | {f'`{ours}`' if ours else 'none'} | {note} |")
    same = ", ".join(dict.fromkeys(f"`{name.ours}`" for name in system.names if name.flag == name.ours))
    return "\n".join(rows) + f"\n\nThe same here: {same}."
