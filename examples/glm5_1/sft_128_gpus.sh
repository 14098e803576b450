#!/usr/bin/env bash
# GLM-5.1, LoRA, packed, on 16 nodes of 8 H800: the command line of the ms-swift report from 128 GPUs.
set -euo pipefail
nodes=16
pipeline=(
    --tensor-model-parallel-size 4 --expert-model-parallel-size 8 --pipeline-model-parallel-size 4
    --micro-batch-size 1 --global-batch-size 32
)
source "$(dirname "$0")/launch.sh"

launch \
    --tuner_type lora \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --merge_lora false \
    --tensor_model_parallel_size 4 \
    --expert_model_parallel_size 8 \
    --pipeline_model_parallel_size 4 \
    --decoder_last_pipeline_num_layers 18 \
    --moe_grouped_gemm true \
    --moe_shared_expert_overlap true \
    --moe_aux_loss_coeff 0.01 \
    --dsa_indexer_loss_coeff 0.01 \
    --sequence_parallel true \
    --micro_batch_size 1 \
    --global_batch_size 32 \
    --packing true \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --finetune true \
    --cross_entropy_loss_fusion true \
    --optimizer_cpu_offload false \
    --optimizer_offload_fraction 1 \
    --attention_backend flash \
    --lr 1e-4 \
    --lr_warmup_fraction 0.05 \
    --min_lr 1e-5 \
    --train_iters 100 \
    --max_length 8192 \
    --save_steps 100 \
    --logging_steps 1 \
    --dataloader_num_workers 4 \
    --dataset_num_proc 8 \
    --no_save_optim true \
    --no_save_rng true \
    --agent_template glm5_1 \
    "$@"
