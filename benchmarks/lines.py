"""How much there is to read, and how dense it is, of each package, now and at another commit.

Lines of code, docstrings, comments and blanks; tokens of code, tokens a line, and clever constructs (comprehensions, generator
expressions, ternaries, walruses, lambdas) per 100 lines.

python benchmarks/lines.py                # the working tree
python benchmarks/lines.py 9762a0a        # the same beside that commit
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("code", "docstrings", "comments", "blank")
CLEVER = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.NamedExpr, ast.Lambda)


def count(text: str) -> Counter[str]:
    """Count the lines of a Python file by kind, its tokens of code and its clever constructs.

    A line with code and a comment is code.

    >>> dict(count('\"\"\"What it is.\"\"\"\\n\\nx = 1 if y else 2  # one\\n# alone\\n'))
    {'docstrings': 1, 'code': 1, 'comments': 1, 'blank': 1, 'tokens': 7, 'clever': 1}
    """
    kinds: dict[int, str] = {}
    tokens = clever = 0
    for node in ast.walk(ast.parse(text)):
        clever += isinstance(node, CLEVER)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            kinds |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), "docstrings")
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            kind = "comments" if token.type == tokenize.COMMENT else "code"
            tokens += kind == "code" and kinds.get(token.start[0]) != "docstrings"
            for line in range(token.start[0], token.end[0] + 1):
                if kinds.get(line) in (None, "comments"):
                    kinds[line] = kind
    found = Counter(kinds[line] for line in sorted(kinds))
    found["blank"] = len(text.splitlines()) - len(kinds)
    found["tokens"], found["clever"] = tokens, clever
    return found


def density(counts: Counter[str]) -> str:
    """Return tokens, tokens a line and clever constructs per 100 lines, in columns."""
    lines = max(counts["code"], 1)
    return f"{counts['tokens']:10,}{counts['tokens'] / lines:8.1f}{100 * counts['clever'] / lines:12.1f}"


def packages(commit: str | None) -> dict[str, Counter[str]]:
    """Lines by kind of every package of src/groupwise, and of the tests."""
    found: dict[str, Counter[str]] = {}
    for path, text in files(commit):
        parts = Path(path).parts
        name = "tests" if parts[0] == "tests" else parts[2] if len(parts) > 3 else "root"
        if name == "rollout" and len(parts) > 4:
            name = f"rollout/{parts[3]}"
        found.setdefault(name, Counter()).update(count(text))
    return dict(sorted(found.items()))


def files(commit: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of every Python file of src and tests."""
    if commit is None:
        for folder in ("src", "tests"):
            for path in (ROOT / folder).rglob("*.py"):
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        return
    command = ["git", "ls-tree", "-r", "--name-only", commit, "src", "tests"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in (name for name in names if name.endswith(".py")):
        shown = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True)
        yield name, shown.stdout


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="a commit to compare with")
    options = parser.parse_args()
    now, then = packages(None), packages(options.commit) if options.commit else {}
    measured = f"{'tokens':>10}{'a line':>8}{'clever/100':>12}"
    title = f"{'':16}" + "".join(f"{kind:>12}" for kind in (*KINDS, "all")) + measured
    print(title + (f"      before: code{measured}" if then else ""))
    rows = {name: now.get(name, Counter()) for name in {**now, **then}}
    whole = [name for name in rows if name != "tests"]
    rows["src"] = sum((rows[name] for name in whole), Counter())
    if then:
        then["src"] = sum((then[name] for name in then if name != "tests"), Counter())
    for name, lines in rows.items():
        sizes = [*(lines[kind] for kind in KINDS), sum(lines[kind] for kind in KINDS)]
        before = f"{then[name]['code']:18,}{density(then[name])}" if name in then else ""
        print(f"{name:16}" + "".join(f"{size:12,}" for size in sizes) + density(lines) + before)


if __name__ == "__main__":
    main()
