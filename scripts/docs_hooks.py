"""Hooks of the documentation site: README and notebooks as pages, figures of the repository, docstrings.

Between `<!-- api ... -->` and `<!-- end -->` a page holds a list of names for readers of its Markdown
(`bench.tables.reference`); the site shows their docstrings instead.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from bench.tables.reference import find_object, split_api

ROOT = Path(__file__).resolve().parents[1]
# links of pages in docs/ to files outside
_OUTSIDE = re.compile(r"(\]\()((?:\.\./)+)((?:bench|jaxrl|envs_jax|examples|configs|tests)/[^)#]+)")
NOTEBOOK = "bench/results/README.md"
OUTSIDE_DOCS = (NOTEBOOK, *(path.name for path in ROOT.glob("*.md")))  # pages whose links to others begin with docs/
_IN_RESULTS = re.compile(r"\]\(([\w.-]+)\)")  # links of the notebook behind the results
_API = re.compile(r"^<!-- api ([^\n]+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
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
    """Let links to files outside docs/ stay inside the site, and show whole docstrings in place of their lists."""
    if page.file.src_uri in OUTSIDE_DOCS:
        markdown = markdown.replace("](../../docs/", "](../../").replace("](docs/", "](")
    markdown = re.sub(r"(\]\([^)]*notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)  # a page instead of JSON
    markdown = _OUTSIDE.sub(lambda link: link[1] + link[2].removeprefix("../") + link[3], markdown)
    markdown = markdown.replace(" ± ", "\u00a0±\u00a0")  # a value and its interval stay in one line
    return _API.sub(lambda part: show_docstrings(part[1]), markdown)


def show_docstrings(text: str) -> str:
    """Return the directive of mkdocstrings for "path: name, name", as `bench.tables.reference.api_list` takes it."""
    path, names = split_api(text)
    options = ["heading_level: 3"]
    if inspect.ismodule(find_object(path)):
        options += ["show_root_heading: false", "show_root_toc_entry: false"]
    if names:
        options.append(f"members: [{', '.join(names)}]")
    return "\n".join([f"::: {path}", "    options:", *(f"      {option}" for option in options)])
