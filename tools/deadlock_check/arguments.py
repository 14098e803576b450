"""The flags of the command line, and what they mean to the recorder and to the model."""

import argparse
import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .errors import UsageError
from .machine import (
    GLOO,
    SMALL_SEND_BYTES,
    Communicators,
    HardwareQueues,
    Machine,
    nccl_machines,
    parse_torch_version,
)
from .record_schedule import ScheduleOptions

PICTURE_FORMATS = (".png", ".svg", ".pdf")

_COMMUNICATORS: dict[str, Communicators] = {
    "lazy": "lazy",
    "device-bound": "eager",
    "premade": "premade",
}
_HARDWARE_QUEUES: tuple[HardwareQueues, ...] = ("many", "one")


class _Parser(argparse.ArgumentParser):
    """Leaves it to the caller how a wrong argument is reported."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help explains the flags)")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command and its flags.

    Args:
        arguments: As on the command line. Flags may have underscores, as ms-swift writes them.

    Raises:
        UsageError: They make no sense.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = [_with_hyphens(argument) for argument in arguments[:end]]
    options, unknown = _parser().parse_known_args([*own, *arguments[end:]])
    if unknown:
        flags = [argument for argument in unknown if argument.startswith("--")] or unknown
        raise UsageError(
            f"unknown to {options.command}: {' '.join(flags)}; leave out what does not concern the "
            "pipeline's communication (--help lists what does)"
        )
    return options


def machines(options: argparse.Namespace) -> list[Machine]:
    """Return the machines that the flags leave possible."""
    if options.backend == "gloo":
        return [GLOO]
    worlds = [options.world] if options.world else ["lazy", "device-bound"]
    queues = (options.hardware_queues,) if options.hardware_queues else _HARDWARE_QUEUES
    return list(
        nccl_machines(
            parse_torch_version(options.torch_version),
            options.debug_detail,
            communicators=tuple(_COMMUNICATORS[world] for world in worlds),
            hardware_queues=queues,
            buffered_send_bytes=(SMALL_SEND_BYTES if options.small_sends == "buffered" else 0,),
            max_resident_kernels=options.max_resident_kernels,
        )
    )


def schedule(options: argparse.Namespace) -> ScheduleOptions:
    """Return what to record.

    Raises:
        UsageError: The flags contradict each other, or one is missing.
    """
    virtual_size = _virtual_size(options)
    overlap = options.overlap_p2p_communication
    if overlap is None:
        overlap = virtual_size > 1
    return ScheduleOptions(
        pipeline_size=options.pipeline_model_parallel_size,
        virtual_size=virtual_size if virtual_size > 1 else None,
        num_microbatches=_num_microbatches(options),
        microbatch_group_size_per_vp_stage=(
            options.microbatch_group_size_per_virtual_pipeline_stage
        ),
        variable_seq_lengths=options.variable_seq_lengths,
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=options.overlap_p2p_communication_warmup_flush,
        batch_p2p_comm=not (overlap or options.no_batch_p2p_communication),
        forward_only=options.forward_only,
        use_gloo=not options.disable_gloo_process_groups,
        ms_swift_world_group=options.ms_swift,
        coalesces=machines(options)[0].coalesces,
    )


def description(options: argparse.Namespace) -> str:
    """Return what is recorded, in one line."""
    recorded = schedule(options)
    parts = {
        f"PP={recorded.pipeline_size}": True,
        f"VPP={recorded.virtual_size}": recorded.virtual_size is not None,
        f"{recorded.num_microbatches} microbatches": True,
        "variable lengths": recorded.variable_seq_lengths,
        "fixed lengths": not recorded.variable_seq_lengths,
        "batched": recorded.batch_p2p_comm,
        "unbatched": not (recorded.batch_p2p_comm or recorded.overlap_p2p_comm),
        "overlapped": recorded.overlap_p2p_comm,
        "with warmup and flush": recorded.overlap_p2p_comm_warmup_flush,
        "forward only": recorded.forward_only,
        "without gloo": not recorded.use_gloo,
        "ms-swift's wrapper": recorded.ms_swift_world_group,
        options.implementation: True,
    }
    return ", ".join(part for part, is_so in parts.items() if is_so)


def _virtual_size(options: argparse.Namespace) -> int:
    if options.num_layers_per_virtual_pipeline_stage is None:
        return options.virtual_pipeline_model_parallel_size or 1
    if options.virtual_pipeline_model_parallel_size is not None:
        raise UsageError(
            "--num-layers-per-virtual-pipeline-stage and --virtual-pipeline-model-parallel-size "
            "say the same; give one of them"
        )
    if options.num_layers is None:
        raise UsageError("--num-layers-per-virtual-pipeline-stage needs --num-layers; add it")
    return _quotient(
        "--num-layers",
        options.num_layers,
        "--pipeline-model-parallel-size x --num-layers-per-virtual-pipeline-stage",
        options.pipeline_model_parallel_size * options.num_layers_per_virtual_pipeline_stage,
    )


def _num_microbatches(options: argparse.Namespace) -> int:
    if (options.num_microbatches is None) == (options.global_batch_size is None):
        raise UsageError(
            "give --num-microbatches, or else --global-batch-size with --micro-batch-size and "
            "--data-parallel-size (or --world-size)"
        )
    if options.num_microbatches is not None:
        return options.num_microbatches
    return _quotient(
        "--global-batch-size",
        options.global_batch_size,
        "--micro-batch-size x data parallel size",
        options.micro_batch_size * _data_parallel_size(options),
    )


def _data_parallel_size(options: argparse.Namespace) -> int:
    if (options.data_parallel_size is None) == (options.world_size is None):
        raise UsageError("--global-batch-size needs --data-parallel-size or --world-size; give one")
    if options.data_parallel_size is not None:
        return options.data_parallel_size
    return _quotient(
        "--world-size",
        options.world_size,
        "pipeline x tensor x context parallel size",
        options.pipeline_model_parallel_size
        * options.tensor_model_parallel_size
        * options.context_parallel_size,
    )


def _quotient(flag: str, value: int, divisor_name: str, divisor: int) -> int:
    if value % divisor:
        raise UsageError(
            f"{flag} {value} is no multiple of {divisor_name} = {divisor}; change one of them"
        )
    return value // divisor


def _with_hyphens(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tools.deadlock_check",
        description="Decides whether a pipeline configuration can hang under PyTorch's and NCCL's "
        "rules, without a GPU. Exit status: 0 safe, 1 unsafe, 2 bad usage.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, purpose: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=purpose, description=f"{purpose.capitalize()}.", allow_abbrev=False
        )

    run = command("run", "record the schedule of an installed megatron-core and check it")
    _add_schedule_flags(run.add_argument_group("the pipeline, as in Megatron's command line"))
    run.add_argument(
        "--implementation",
        default="installed",
        metavar="installed|base:VERSION",
        help="whose communication is recorded (default: the installed megatron-core)",
    )
    pattern = command("pattern", "check a pattern that was written by hand")
    pattern.add_argument("file", type=Path, metavar="FILE")
    trace = command("trace", "check the recorded trace of a job")
    trace.add_argument("files", type=Path, nargs="+", metavar="FILE")
    for checking in (run, pattern, trace):
        _add_machine_flags(checking.add_argument_group("how PyTorch and NCCL run it"))
        _add_output_flags(checking.add_argument_group("output"))
    record = command("record", "run a command and record what its processes communicate")
    record.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    record.add_argument("recorded", nargs="+", metavar="-- COMMAND")
    matrix = command("matrix", "check the configurations of docs/support_matrix.md")
    matrix.add_argument("--format", choices=("markdown", "json"), default="markdown")
    matrix.add_argument("--jobs", type=_positive, default=1, metavar="N", help="processes")
    return parser


def _add_schedule_flags(group: argparse._ArgumentGroup) -> None:
    sizes = {
        "--pipeline-model-parallel-size": "number of pipeline stages",
        "--num-layers": "layers of the model",
        "--num-layers-per-virtual-pipeline-stage": "layers of a model chunk",
        "--virtual-pipeline-model-parallel-size": "model chunks of a rank, if not told by layers",
        "--microbatch-group-size-per-virtual-pipeline-stage": "default: the number of stages",
        "--num-microbatches": "microbatches of a step, if not told by batch sizes",
        "--global-batch-size": "sequences of a step",
        "--micro-batch-size": "sequences of a microbatch (default: 1)",
        "--data-parallel-size": "number of pipelines that share a global batch",
        "--world-size": "number of GPUs, from which the data parallel size follows",
        "--tensor-model-parallel-size": "needed with --world-size only",
        "--context-parallel-size": "needed with --world-size only",
        "--expert-model-parallel-size": "changes nothing for the pipeline",
    }
    defaults = {
        "--micro-batch-size": 1,
        "--tensor-model-parallel-size": 1,
        "--context-parallel-size": 1,
    }
    # Megatron's own name for it today.
    also = {"--virtual-pipeline-model-parallel-size": ["--num-virtual-stages-per-pipeline-rank"]}
    for flag, purpose in sizes.items():
        group.add_argument(
            flag,
            *also.get(flag, []),
            type=_positive,
            default=defaults.get(flag),
            required=flag == "--pipeline-model-parallel-size",
            metavar="N",
            help=purpose,
        )
    group.add_argument(
        "--overlap-p2p-communication",
        action=argparse.BooleanOptionalAction,
        help="default: with virtual stages, as in Megatron",
    )
    switches = {
        "--overlap-p2p-communication-warmup-flush": "overlap in warmup and flush too",
        "--no-batch-p2p-communication": "batch_p2p_comm=False without overlap",
        "--variable-seq-lengths": "microbatches differ in length, so shapes are exchanged",
        "--forward-only": "evaluation",
        "--disable-gloo-process-groups": "no process groups on the CPU",
        "--ms-swift": "ms-swift's wrapper, which puts batched data on the default group",
    }
    for flag, purpose in switches.items():
        group.add_argument(flag, action="store_true", help=purpose)


def _add_machine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    group.add_argument(
        "--torch-version",
        default=re.match(r"\d+\.\d+", importlib.metadata.version("torch"))[0],  # type: ignore[index]
        metavar="X.Y",
        help="from 2.6 on (default: the installed one, %(default)s)",
    )
    group.add_argument(
        "--debug-detail", action="store_true", help="TORCH_DISTRIBUTED_DEBUG=DETAIL is set"
    )
    group.add_argument(
        "--world",
        choices=tuple(_COMMUNICATORS),
        help="device-bound: init_process_group was given a device_id; premade: all communicators "
        "and connections exist before the schedule (default: lazy and device-bound)",
    )
    group.add_argument(
        "--hardware-queues",
        choices=_HARDWARE_QUEUES,
        help="one: CUDA_DEVICE_MAX_CONNECTIONS=1 (default: check both)",
    )
    group.add_argument(
        "--small-sends",
        choices=("strict", "buffered"),
        default="strict",
        help=f"buffered: sends up to {SMALL_SEND_BYTES} bytes complete before they are received; "
        "NCCL does so often, but promises it nowhere (default: strict)",
    )
    group.add_argument(
        "--max-resident-kernels",
        type=_positive,
        metavar="N",
        help="kernels that can be on a GPU at once (default: no limit)",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="print the report as JSON")
    group.add_argument(
        "--plot", type=_picture, metavar="FILE.png", help="draw the timeline; also .svg and .pdf"
    )
    group.add_argument(
        "--save-trace", type=Path, metavar="FILE.jsonl", help="keep what was checked"
    )


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in PICTURE_FORMATS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no picture; end its name in {', '.join(PICTURE_FORMATS)}"
        )
    return path


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
