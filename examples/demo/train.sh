#!/usr/bin/env bash
# Trains a small GPT on the standard library's sources with PP=4 x VPP=2 and packed documents of
# varying lengths: on 4 GPUs where there are 4, else on the CPU under the CUDA emulation.
# Usage: examples/demo/train.sh WORK_FOLDER   (with the fork's environment active)
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${1:?usage: examples/demo/train.sh WORK_FOLDER}
examples/demo/prepare_data.sh "$work"

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "$gpus" -ge 4 ]; then
    launch=()
else
    launch=(python -m tools.cpu_emulation)
    # The ranks share this machine: the loopback will do, and threads would only compete.
    export GLOO_SOCKET_IFNAME=lo
fi
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 NO_VCS_VERSION=1 PYTHONWARNINGS=ignore

"${launch[@]}" python -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py \
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 \
    --num-layers 8 --hidden-size 96 --num-attention-heads 4 --untie-embeddings-and-output-weights \
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope \
    --seq-length 256 --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0 \
    --micro-batch-size 1 --global-batch-size 8 --train-iters 60 \
    --variable-seq-lengths --log-microbatch-lengths --num-workers 0 \
    --data-path "$work/stdlib_text_document" --split 100,0,0 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$work/stdlib_tokenizer" \
    --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion \
    --no-rope-fusion --no-gradient-accumulation-fusion \
    --lr 4e-3 --min-lr 3e-4 --adam-beta2 0.95 --lr-warmup-iters 10 --lr-decay-style cosine \
    --clip-grad 1.0 --weight-decay 0.1 --eval-iters 0 --eval-interval 60 --log-interval 5 \
    2>&1 | tee "$work/train.log" | grep --line-buffered -E '^ *(\[.*\])? *iteration +[0-9]+/|tokens in documents|Error:'

python examples/demo/summary.py "$work/train.log"
