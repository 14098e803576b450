#!/usr/bin/env bash
# Makes WORK_FOLDER/stdlib_text_document.{bin,idx} and WORK_FOLDER/stdlib_tokenizer from the sources of
# Python's standard library, unless they are there.
# Usage: examples/demo/prepare_data.sh WORK_FOLDER   (with the fork's environment active)
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${1:?usage: examples/demo/prepare_data.sh WORK_FOLDER}
mkdir -p "$work"

if [ ! -e "$work/stdlib_text_document.idx" ]; then
    python examples/demo/definitions.py >"$work/stdlib.jsonl"
    python tools/preprocess_data.py --input "$work/stdlib.jsonl" \
        --train-tokenizer --vocab-size 2048 --append-eod --workers 2 \
        --output-prefix "$work/stdlib" --overwrite
fi
