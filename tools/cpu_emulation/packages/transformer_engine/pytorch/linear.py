"""Linear layers, split over the ranks of tensor parallelism as Transformer Engine splits them."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from ..refusal import refuse
from .distributed import (
    copy_to_region,
    gather_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
)
from .normalization import normalized

_REMEDIES = {
    "fuse_wgrad_accumulation": "add --no-gradient-accumulation-fusion "
    "(ms-swift: --gradient_accumulation_fusion false)",
    "delay_wgrad_compute": "leave out --delay-wgrad-compute",
    "ub_overlap_ag": "leave out --tp-comm-overlap",
    "ub_overlap_rs": "leave out --tp-comm-overlap",
    "ub_bulk_wgrad": "leave out --tp-comm-overlap",
    "ub_bulk_dgrad": "leave out --tp-comm-overlap",
    "symmetric_ar_type": "leave out --symmetric-ar-type",
}


class _LinearModule(nn.Module):
    """What the linear modules share: size, split, initial weights, and that fp8 is off."""

    # The base reads these when it saves a checkpoint.
    fp8 = False
    fp8_initialized = False
    fp8_calibration = False
    fp8_parameters = False
    primary_weights_in_fp8 = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        refuse(others, _REMEDIES)
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.tp_group = tp_group
        self.tp_size = tp_size
        self.parallel_mode = parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias = bias
        self.return_bias = return_bias
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self._dtype = params_dtype or torch.get_default_dtype()
        self._init_method = init_method
        self._tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None
        self._tracker_name = rng_tracker_name

    def _add_weight(self, name: str) -> None:
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=self._dtype))
        if self._init_method is None:
            nn.init.kaiming_uniform_(weight, a=5**0.5)
        else:
            with self._own_random_numbers():
                self._init_method(weight)
        split_at = 1 if self.parallel_mode == "row" else 0
        weight.tensor_model_parallel = self.parallel_mode is not None  # type: ignore[attr-defined]
        weight.partition_dim = split_at  # type: ignore[attr-defined]
        weight.partition_stride = 1  # type: ignore[attr-defined]
        self.register_parameter(name, weight)

    def _add_bias(self, name: str) -> None:
        bias = nn.Parameter(torch.zeros(self.out_features, dtype=self._dtype))
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        else:
            bias.tensor_model_parallel = self.parallel_mode is not None  # type: ignore[attr-defined]
            bias.partition_dim = 0  # type: ignore[attr-defined]
            bias.partition_stride = 1  # type: ignore[attr-defined]
        self.register_parameter(name, bias)

    def _own_random_numbers(self) -> contextlib.AbstractContextManager[None]:
        if self._tracker is None:
            return contextlib.nullcontext()
        return (
            self._tracker.fork(self._tracker_name) if self._tracker_name else self._tracker.fork()
        )

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the ranks over which the weights are split."""
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: there is no fp8 to prepare."""

    def get_extra_state(self) -> torch.Tensor:
        """Return what a checkpoint keeps beside the weights: nothing, as without fp8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Take nothing from a checkpoint."""

    def _entering(self, value: torch.Tensor) -> torch.Tensor:
        if self.parallel_mode != "column" or self.tp_size == 1:
            return value
        assert self.tp_group is not None
        enter = gather_sequence if self.sequence_parallel else copy_to_region
        return enter(value, self.tp_group)

    def _leaving(self, value: torch.Tensor) -> torch.Tensor:
        if self.parallel_mode != "row" or self.tp_size == 1:
            return value
        assert self.tp_group is not None
        leave = reduce_scatter_sequence if self.sequence_parallel else reduce_from_region
        return leave(value, self.tp_group)


class Linear(_LinearModule):
    """``y = x W^T + b``; W is split over its columns' outputs, its rows' inputs, or not at all."""

    def __init__(self, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(in_features, out_features, **settings)
        self.bias: nn.Parameter | None
        self.weight: nn.Parameter
        self._add_weight("weight")
        if self.use_bias:
            self._add_bias("bias")
        else:
            self.bias = None

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **ignored: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Return the product, [..., out_features]; with ``return_bias`` the bias beside it.

        Args:
            inp: Of shape [tokens, ..., in_features]. With sequence parallelism a column-parallel
                layer takes, and a row-parallel one returns, this rank's part of the tokens.
            is_first_microbatch: Without meaning here.
            **ignored: Further hints for kernels.
        """
        product = self._leaving(functional.linear(self._entering(inp), self.weight))
        if self.return_bias:
            return product, self.bias
        return product if self.bias is None else product + self.bias


class LayerNormLinear(Linear):
    """A norm over the inputs, then a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(in_features, out_features, **settings)
        # LoRA switches these on and off between two calls.
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        initial = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(initial(in_features, dtype=self._dtype))
        shift = torch.zeros(in_features, dtype=self._dtype)
        self.layer_norm_bias = nn.Parameter(shift) if normalization == "LayerNorm" else None
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **ignored: Any
    ) -> Any:
        """Return what :meth:`Linear.forward` does of the normalized ``inp``.

        With ``return_layernorm_output`` the normalized ``inp`` is the last of what is returned:
        this rank's part of the tokens, or all with ``return_layernorm_output_gathered``.
        """
        normal = normalized(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            kind=self.normalization,
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
        )
        result = super().forward(normal)
        if not self.return_layernorm_output:
            return result
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            assert self.tp_group is not None
            normal = gather_sequence(normal, self.tp_group)
        return (*result, normal) if isinstance(result, tuple) else (result, normal)


class GroupedLinear(_LinearModule):
    """One linear layer per expert, each for its own rows of the input."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, **settings: Any
    ) -> None:
        super().__init__(in_features, out_features, **settings)
        self.num_gemms = num_gemms
        for expert in range(num_gemms):
            self._add_weight(f"weight{expert}")
            if self.use_bias:
                self._add_bias(f"bias{expert}")

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: list[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        **ignored: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Return the products, [rows, out_features]; with ``return_bias`` the biases beside them.

        Args:
            inp: Of shape [rows, in_features], sorted by expert.
            m_splits: Number of rows of every expert.
            is_first_microbatch: Without meaning here.
            **ignored: Further hints for kernels.
        """
        rows = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        biases = (
            [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None
        )
        products = [
            functional.linear(
                part,
                getattr(self, f"weight{expert}"),
                None if biases is None or self.return_bias else biases[expert],
            )
            for expert, part in enumerate(inp.split(rows))
        ]
        product = torch.cat(products)
        return (product, biases) if self.return_bias else product
