#!/usr/bin/env bash
# GLM-5.1, full parameters, packed, on 24 nodes of 8 H800: the command line of Megatron-LM issue 5100.
set -euo pipefail
nodes=24
pipeline=(
    --tensor-model-parallel-size 4 --expert-model-parallel-size 8 --pipeline-model-parallel-size 4
    --micro-batch-size 1 --global-batch-size 48
)
source "$(dirname "$0")/launch.sh"

launch \
    --tensor_model_parallel_size 4 \
    --expert_model_parallel_size 8 \
    --pipeline_model_parallel_size 4 \
    --decoder_last_pipeline_num_layers 18 \
    --moe_grouped_gemm true \
    --sequence_parallel true \
    --packing true \
    --micro_batch_size 1 \
    --global_batch_size 48 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --finetune true \
    --max_length 8192 \
    "$@"
