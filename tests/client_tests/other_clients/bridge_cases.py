"""A case function that trains and evaluates a GPT with Megatron-Bridge's own loop.

It runs on ranks that have Megatron-Bridge and the stand-in for Transformer Engine. Configuration,
model, data, optimizer, ``setup``, ``train`` and ``evaluate`` are Megatron-Bridge's; its
``pretrain``, which calls them in this order, needs NVIDIA's resiliency extension.
"""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from tests.client_tests.other_clients.split_weights import set_weights

_LAYERS = 4
_SEQUENCE_LENGTH = 16
_VOCABULARY = 64
_STEPS = 2
_LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Results:
    """What the loop reported on one rank.

    Attributes:
        losses: Of each step; empty on all but the last stage.
        gradient_norms: Of each step.
        evaluation_loss: After the last step; None on all but the last stage.
    """

    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    evaluation_loss: float | None


def train_with_bridge(
    pipeline_size: int,
    virtual_size: int | None,
    num_microbatches: int,
    is_variable: bool,
    overlap: bool,
) -> Results:
    """Trains two steps and evaluates.

    Args:
        pipeline_size: Number of pipeline stages; equal to the world size.
        virtual_size: Model chunks per stage, None for no interleaving.
        num_microbatches: Of each step, and of the evaluation.
        is_variable: Whether shapes are exchanged. The lengths themselves are constant.
        overlap: Whether communication overlaps; interleaved schedules only.

    Returns:
        The results, which depend on ``num_microbatches`` alone.
    """
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.eval import evaluate
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.setup import setup
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.training.train import train
    from megatron.core.utils import unwrap_model

    config = _configuration(pipeline_size, virtual_size, num_microbatches, is_variable, overlap)
    config.validate()
    state = GlobalState()
    state.cfg = config
    # The wheels bring it compiled; make would compile it again in an unpacked one.
    with mock.patch("megatron.bridge.training.initialize.compile_helpers"):
        ready = setup(state, get_dataset_provider(config.dataset))
    for chunk in unwrap_model(ready.model):
        set_weights(chunk)

    losses: list[float] = []
    norms: list[float] = []

    def record(context: Any) -> None:
        losses.extend(float(loss) for loss in context.loss_dict.values())
        norms.append(float(context.grad_norm))

    callbacks = CallbackManager()
    callbacks.register("on_train_step_end", record)
    train(
        forward_step,
        ready.model,
        ready.optimizer,
        ready.scheduler,
        ready.train_data_iterator,
        ready.valid_data_iterator,
        ready.state,
        ready.checkpoint_manager,
        ready.pg_collection,
        callback_manager=callbacks,
    )
    evaluated, _, _ = evaluate(
        ready.state, forward_step, ready.valid_data_iterator, ready.model, None, config.model
    )
    return Results(
        losses=tuple(losses),
        gradient_norms=tuple(norms),
        evaluation_loss=float(evaluated["lm loss"]) if evaluated else None,
    )


def _configuration(
    pipeline_size: int,
    virtual_size: int | None,
    num_microbatches: int,
    is_variable: bool,
    overlap: bool,
) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config

    return config.ConfigContainer(
        model=GPTModelProvider(
            num_layers=_LAYERS,
            hidden_size=32,
            ffn_hidden_size=64,
            num_attention_heads=4,
            seq_length=_SEQUENCE_LENGTH,
            vocab_size=_VOCABULARY,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=pipeline_size,
            virtual_pipeline_model_parallel_size=virtual_size,
            variable_seq_lengths=is_variable,
            moe_token_dispatcher_type="alltoall",
            overlap_p2p_comm=overlap,
            batch_p2p_comm=not overlap,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
        ),
        train=config.TrainingConfig(
            micro_batch_size=1, global_batch_size=num_microbatches, train_iters=_STEPS
        ),
        validation=config.ValidationConfig(eval_iters=1, eval_interval=10 * _STEPS),
        optimizer=config.OptimizerConfig(
            optimizer="sgd",
            lr=_LEARNING_RATE,
            min_lr=_LEARNING_RATE,
            clip_grad=0.0,
            use_distributed_optimizer=False,
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant",
            lr_decay_iters=_STEPS,
            lr_warmup_iters=0,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
        ),
        ddp=config.DistributedDataParallelConfig(
            use_distributed_optimizer=False, overlap_param_gather=False
        ),
        dataset=config.MockGPTDatasetConfig(
            seq_length=_SEQUENCE_LENGTH,
            random_seed=1,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
            num_workers=0,
        ),
        logger=config.LoggerConfig(),
        tokenizer=config.TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=_VOCABULARY - 1
        ),
        checkpoint=config.CheckpointConfig(),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        rng=config.RNGConfig(seed=1),
    )
