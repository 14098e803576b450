#!/usr/bin/env bash
# Runs functional cases on GPUs, each in four environments, and checks them; see docs/gpu.md.
#   run.sh --list                   the cases
#   run.sh CASE|all [--variant V]   on this node of 8 GPUs; in a Slurm allocation on several nodes
#   run.sh CASE|all --cpu           shrunk, under the CPU emulation
# The environment of the fork must be active, or PYTHON name its interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m tests.functional_tests.run "$@"
