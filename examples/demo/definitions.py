"""Writes every function and method of the standard library's modules as one JSON line."""

import ast
import json
import sysconfig
from pathlib import Path


def main() -> None:
    """Print the documents of the demo, one ``{"text": ...}`` per line."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for statement in ast.parse(source).body:
            members = statement.body if isinstance(statement, ast.ClassDef) else [statement]
            for function in members:
                if isinstance(function, ast.FunctionDef):
                    print(json.dumps({"text": ast.get_source_segment(source, function)}))


if __name__ == "__main__":
    main()
