"""Writes every function and method of the standard library's modules as one JSON line."""

import ast
import json
import sysconfig
from pathlib import Path


def main() -> None:
    """Print the documents of the demo, one ``{"text": ...}`` per line."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        module = ast.parse(source)
        classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
        for owner in (module, *classes):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    print(json.dumps({"text": ast.get_source_segment(source, node)}))


if __name__ == "__main__":
    main()
