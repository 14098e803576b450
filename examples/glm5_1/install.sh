#!/usr/bin/env bash
# Installs ms-swift and this checkout's commit of the fork into the active environment. Run it once in
# the image or environment that all nodes use. PyTorch, Transformer Engine and the attention kernels
# stay as they are.
# Usage: examples/glm5_1/install.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ -n "$(git status --porcelain)" ]; then
    echo "install.sh: this checkout has changes that are not committed; pip would install" \
        "$(git rev-parse --short HEAD) without them. Commit or stash them." >&2
    exit 2
fi
python -m pip install "ms-swift[megatron]==4.6.0" "mcore-bridge==1.6.5" \
    "megatron-core @ git+file://localhost$PWD@$(git rev-parse HEAD)"
python -c "import importlib.metadata as m; print('megatron-core', m.version('megatron-core'))"
