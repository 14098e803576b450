"""Writes every top-level function and class of the standard library as one JSON line."""

import ast
import json
import sysconfig
from pathlib import Path


def main() -> None:
    """Print the documents of the demo, one ``{"text": ...}`` per line."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                print(json.dumps({"text": ast.get_source_segment(source, statement)}))


if __name__ == "__main__":
    main()
