#!/usr/bin/env bash
# Pre-trains a GPT-3 with PP=4 x VPP=2 on packed documents of varying lengths.
#   cpu    4 processes under the CUDA emulation, a model of 1 million parameters
#   node   one node of 8 GPUs, GPT-3 XL (1.3 billion parameters)
#   nodes  several nodes, GPT-3 13B; train.sbatch starts it once per node
# Text: DATA_PATH (an indexed dataset) and TOKENIZER_MODEL, else the sources of Python's standard library.
# Usage: examples/gpt3/train.sh cpu|node|nodes WORK_FOLDER [more flags of pretrain_gpt.py]
set -euo pipefail
usage="usage: $0 cpu|node|nodes WORK_FOLDER [more flags of pretrain_gpt.py]"
scale=${1:?$usage}
mkdir -p "${2:?$usage}"
work=$(cd "$2" && pwd)
shift 2
cd "$(dirname "$0")/../.."

common=(
    --log-microbatch-lengths --split 98,2,0
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --lr-decay-style cosine --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 0.1
    --eval-interval 1000 --eval-iters 0 --tokenizer-type HuggingFaceTokenizer
)
on_gpus=(
    --transformer-impl transformer_engine --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --train-iters 1000 --lr 2e-4 --min-lr 2e-5 --lr-warmup-iters 100 --log-interval 1
)
# What the deadlock checker needs to know, too.
pipeline=(--pipeline-model-parallel-size 4 --micro-batch-size 1 --variable-seq-lengths)
launch=()
case $scale in
cpu)
    world_size=4
    launch=(python -m tools.cpu_emulation)
    torchrun=(--standalone --nproc-per-node 4)
    pipeline+=(--num-layers 8 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8)
    model=(
        --hidden-size 96 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
        --num-workers 0 --transformer-impl local --no-persist-layer-norm
        --no-masked-softmax-fusion --no-rope-fusion --no-gradient-accumulation-fusion
        --train-iters 20 --lr 4e-3 --min-lr 3e-4 --lr-warmup-iters 5 --log-interval 1
    )
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} OMP_NUM_THREADS=1
    ;;
node)
    world_size=8
    torchrun=(--standalone --nproc-per-node 8)
    pipeline+=(--num-layers 24 --num-layers-per-virtual-pipeline-stage 3 --global-batch-size 128)
    model=(
        --hidden-size 2048 --num-attention-heads 16
        --seq-length 2048 --max-position-embeddings 2048 "${on_gpus[@]}"
    )
    ;;
nodes)
    : "${NNODES:?is set by train.sbatch: the number of nodes}"
    : "${NODE_RANK:?is set by train.sbatch: the position of this node}"
    : "${MASTER_ADDR:?is set by train.sbatch: the address of node 0}"
    world_size=$((NNODES * 8))
    torchrun=(
        --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node 8
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
    )
    pipeline+=(
        --tensor-model-parallel-size 2
        --num-layers 40 --num-layers-per-virtual-pipeline-stage 5 --global-batch-size 512
    )
    model=(
        --sequence-parallel --hidden-size 5120 --num-attention-heads 40
        --seq-length 2048 --max-position-embeddings 2048 "${on_gpus[@]}"
    )
    ;;
*)
    echo "$0: $scale is not a scale; $usage" >&2
    exit 2
    ;;
esac

lacking=()
version=$(python -c "import importlib.metadata as m; print(m.version('megatron-core'))" 2>/dev/null ||
    echo none)
[[ $version == *+p2p.* ]] || lacking+=("the fork: megatron-core is $version (make install, docs/install.md)")
if [ "$scale" != cpu ]; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    [ "$gpus" -ge 8 ] || lacking+=("8 GPUs on this node (there are $gpus)")
    python -c "import transformer_engine" 2>/dev/null || lacking+=("the package transformer_engine")
fi
if [ ${#lacking[@]} -gt 0 ]; then
    echo "$0 $scale lacks:" >&2
    printf '  %s\n' "${lacking[@]}" >&2
    exit 2
fi

if [ -z "${DATA_PATH:-}" ]; then
    # On several nodes WORK_FOLDER is shared; whoever comes first prepares the text for all.
    flock "$work/prepare_data.lock" examples/demo/prepare_data.sh "$work"
fi
flags=(
    "${pipeline[@]}" "${common[@]}" "${model[@]}"
    --data-path "${DATA_PATH:-$work/stdlib_text_document}"
    --tokenizer-model "${TOKENIZER_MODEL:-$work/stdlib_tokenizer}"
)
if [ "${NODE_RANK:-0}" = 0 ]; then
    # Ends the script if the pipeline can hang.
    python -m tools.deadlock_check run --world-size "$world_size" "${pipeline[@]}"
fi

export CUDA_DEVICE_MAX_CONNECTIONS=1 NO_VCS_VERSION=1
"${launch[@]}" python -m torch.distributed.run "${torchrun[@]}" pretrain_gpt.py "${flags[@]}" "$@"
