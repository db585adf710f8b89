"""Count code lines of packages: lines that are not blank, comments, docstrings or imports.

python scripts/count_code.py jaxrl envs_jax
"""

import ast
import sys
import tokenize
from pathlib import Path

IGNORED = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def find_code_lines(path: Path) -> set[int]:
    """Return the numbers of the code lines of a Python file."""
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in IGNORED]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_bytes())):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (is_import or is_text):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def main() -> None:
    """Print the code lines of each package that the command line names."""
    for package in sys.argv[1:] or ["jaxrl", "envs_jax"]:
        counts = {path: len(find_code_lines(path)) for path in sorted(Path(package).rglob("*.py"))}
        print(f"{package}: {sum(counts.values()):,} code lines in {len(counts)} files")


if __name__ == "__main__":
    main()
