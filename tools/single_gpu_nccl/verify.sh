#!/usr/bin/env bash
# Base against fork with several NCCL ranks on one GPU, in at most 8 minutes; see docs/gpu.md.
#   verify.sh --prepare                  on a machine with a network: fetches and builds the packages
#   verify.sh [--report FILE]            on the machine with the GPU, which needs no network
#   verify.sh --dry-run [--report FILE]  the same path on the CPU, over gloo
# The packages lie in PACKAGES (default: build/single_gpu_nccl), made for the Python in PYTHON.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
wheels=${PACKAGES:-build/single_gpu_nccl}
base=$(sed -n 's/^DEFAULT_BASE *= *"\(.*\)"/\1/p' build_backend/release.py)

if [ "${1:-}" = --prepare ]; then
    rm -rf "$wheels"
    mkdir -p "$wheels"/{base,fork,common}
    "$python" -m pip download --quiet --no-deps --dest "$wheels/base" "megatron-core==$base"
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels/fork" .
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels/common" \
        $(grep -ohE '^(psutil|py-spy|tqdm|packaging)==[^ ]*' tests/requirements.txt)
    du -sh "$wheels"
    exit
fi

if ! ls "$wheels"/fork/*.whl >/dev/null 2>&1; then
    echo "verify.sh: error: no packages in $wheels: run verify.sh --prepare" >&2
    exit 2
fi
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
for name in base fork common; do
    "$python" -m pip install --quiet --no-index --no-deps --no-compile \
        --target "$unpacked/$name" "$wheels/$name"/*.whl
done
report=(--report build/single_gpu_nccl_report.json)
for argument in "$@"; do
    [ "$argument" != --report ] || report=()
done
PATH="$unpacked/common/bin:$PATH" PYTHONPATH="$unpacked/common:$PWD" NO_VCS_VERSION=1 \
    "$python" -P -m tools.single_gpu_nccl.verify --packages "$unpacked" "${report[@]}" "$@"
