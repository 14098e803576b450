"""Entry for tools that still call setup.py; pip reads pyproject.toml."""

from build_backend.setup_command import main

if __name__ == "__main__":
    main()
