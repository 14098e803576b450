#!/usr/bin/env bash
# Prints a Python interpreter that the base release runs on: from PATH first, then from pyenv.
set -u
is_suitable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null
}
candidates=(python3 python3.12 python3.13)
if command -v pyenv >/dev/null; then
    for version in $(pyenv versions --bare); do
        candidates+=("$(pyenv root)/versions/$version/bin/python")
    done
fi
for candidate in "${candidates[@]}"; do
    if command -v "$candidate" >/dev/null && is_suitable "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
echo "no Python 3.12 or 3.13 with venv found on PATH or in pyenv: install one" \
    "(for example 'pyenv install 3.12', or the packages python3.12 and python3.12-venv)" >&2
exit 1
