"""What the fork inserts into files of the base release, and where."""

from build_backend.grafts import Graft

_PARALLEL_STATE = "megatron/core/parallel_state.py"

GRAFTS = (
    Graft(
        file=_PARALLEL_STATE,
        function="initialize_model_parallel",
        where="start",
        statements="""\
from megatron.core.pipeline_parallel import even_odd_groups
even_odd_groups.await_all_ranks(locals())
""",
    ),
    Graft(
        file=_PARALLEL_STATE,
        function="initialize_model_parallel",
        where="end",
        statements="""\
even_odd_groups.create_even_odd_groups(
    decoder_rank_generator.get_ranks('pp'),
    pp_group=get_pipeline_model_parallel_group(),
    virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
    backend=pipeline_model_parallel_comm_backend,
    nccl_options=lambda: get_nccl_options('pp', nccl_comm_cfgs),
    use_gloo=create_gloo_process_groups,
    timeout=timeout,
)
""",
    ),
    Graft(
        file=_PARALLEL_STATE,
        function="destroy_model_parallel",
        where="start",
        statements="""\
from megatron.core.pipeline_parallel import even_odd_groups
even_odd_groups.destroy_even_odd_groups()
""",
    ),
)
