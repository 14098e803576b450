# Sourced by the sft_*_gpus.sh scripts: environment, checks and the pre-flight of a command line.
# shellcheck shell=bash

usage() {
    cat >&2 <<TEXT
Usage, on every node:
  MODEL=/models/GLM-5.1 DATASET=/data/sft.jsonl \\
  NNODES=$nodes NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 $0 [more flags of megatron sft]
PREFLIGHT_ONLY=1 $0 checks the configuration and starts nothing; it needs no GPU.
TEXT
}

set_environment() {
    # Report 2 had all four set. DETAIL makes torch 2.7 to 2.10 issue batches one by one; the other
    # three are read by nobody (--ddp_timeout sets the timeout) or not under these names.
    unset TORCH_DISTRIBUTED_DEBUG NCCL_TIMEOUT NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT
    export NPROC_PER_NODE=8
    # Off by default up to torch 2.10: the last operations of every rank, for a dump when it hangs.
    export TORCH_NCCL_TRACE_BUFFER_SIZE=${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}
    # Seconds until a rank that does not come up is an error that names it.
    export MEGATRON_PIPELINE_STARTUP_TIMEOUT=${MEGATRON_PIPELINE_STARTUP_TIMEOUT:-600}
}

preflight() {
    local root
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    echo "Pre-flight on $((nodes * 8)) GPUs: ${pipeline[*]}"
    PYTHONPATH="$root" python -m tools.deadlock_check run --ms-swift --variable-seq-lengths \
        --world-size $((nodes * 8)) "${pipeline[@]}"
}

require() {
    local lacking=() name version gpus
    command -v megatron >/dev/null || lacking+=("the command megatron (run examples/glm5_1/install.sh)")
    version=$(python -c "import importlib.metadata as m; print(m.version('megatron-core'))" \
        2>/dev/null || echo none)
    [[ $version == *+p2p.* ]] ||
        lacking+=("the fork: megatron-core is $version (run examples/glm5_1/install.sh)")
    for name in MODEL DATASET NODE_RANK MASTER_ADDR MASTER_PORT; do
        [ -n "${!name:-}" ] || lacking+=("the variable $name")
    done
    [ "${NNODES:-}" = "$nodes" ] || lacking+=("NNODES=$nodes (it is ${NNODES:-not set})")
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    [ "$gpus" -ge 8 ] || lacking+=("8 GPUs on this node (there are $gpus)")
    if [ ${#lacking[@]} -gt 0 ]; then
        echo "$0 lacks:" >&2
        printf '  %s\n' "${lacking[@]}" >&2
        usage
        exit 2
    fi
}

launch() {
    set_environment
    if [ -n "${PREFLIGHT_ONLY:-}" ]; then
        preflight
        return
    fi
    require
    if [ "$NODE_RANK" = 0 ]; then
        preflight
    fi
    megatron sft --model "$MODEL" --dataset "$DATASET" --ddp_timeout 1800 "$@"
}
