"""What ranks compute with the stand-in for Transformer Engine, beside plain PyTorch."""

import itertools

import torch
from torch.nn import functional

DOUBLE = torch.float64


def importable_by_the_base():
    """The base finds Transformer Engine and has all its wrappers for the layers of a model."""
    import megatron.core.extensions.transformer_engine as extension
    from transformer_engine import pytorch

    wrappers = {
        "TELinear": pytorch.Linear,
        "TELayerNormColumnParallelLinear": pytorch.LayerNormLinear,
        "TEDotProductAttention": pytorch.DotProductAttention,
        "TEGroupedLinear": pytorch.GroupedLinear,
    }
    assert all(issubclass(getattr(extension, name), kind) for name, kind in wrappers.items())
    return extension.HAVE_TE


def gradients(loss, *tensors):
    return torch.autograd.grad(loss.pow(2).sum(), tensors)


def packed_attention(heads=4, groups=2, key_size=6, value_size=4, lengths=(5, 1, 7), padding=3):
    """Output and gradients of packed causal attention, and of a loop over documents written out."""
    from transformer_engine.pytorch import DotProductAttention

    torch.manual_seed(0)
    rows = sum(lengths) + padding

    def draw(count, size):
        return torch.randn(rows, count, size, dtype=DOUBLE, requires_grad=True)

    query, key, value = draw(heads, key_size), draw(groups, key_size), draw(groups, value_size)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    module = DotProductAttention(heads, (key_size, value_size), softmax_scale=0.3)
    packed = module(
        query,
        key,
        value,
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        attn_mask_type="padding_causal",
    )

    expected = torch.zeros(rows, heads, value_size, dtype=DOUBLE)
    for start, end in itertools.pairwise(bounds.tolist()):
        for head in range(heads):
            group = head * groups // heads
            scores = 0.3 * query[start:end, head] @ key[start:end, group].T
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            expected[start:end, head] = weights @ value[start:end, group]
    expected = expected.flatten(1)
    inputs = (query, key, value)
    return [packed, *gradients(packed, *inputs)], [expected, *gradients(expected, *inputs)]


def layer_norm_linear(kind, zero_centered):
    """Output and gradients of a norm with a linear layer, and of the formulas."""
    from transformer_engine.pytorch import LayerNormLinear

    torch.manual_seed(0)
    layer = LayerNormLinear(
        6, 10, normalization=kind, zero_centered_gamma=zero_centered, params_dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(3, 2, 6, requires_grad=True)
    scale = layer.layer_norm_weight + 1 if zero_centered else layer.layer_norm_weight
    if kind == "LayerNorm":
        deviation = x - x.mean(-1, keepdim=True)
        unit = deviation / (deviation.pow(2).mean(-1, keepdim=True) + layer.eps).sqrt()
        normal = unit * scale + layer.layer_norm_bias
    else:
        normal = x / (x.pow(2).mean(-1, keepdim=True) + layer.eps).sqrt() * scale
    expected = normal @ layer.weight.T + layer.bias
    inputs = (x, *layer.parameters())
    got = layer(x)
    return [got, *gradients(got, *inputs)], [expected, *gradients(expected, *inputs)]


def grouped_linear(rows=(3, 0, 4)):
    """Output and gradients of one linear layer per expert, and of plain products."""
    from transformer_engine.pytorch import GroupedLinear

    torch.manual_seed(0)
    layer = GroupedLinear(len(rows), 5, 7, bias=False, params_dtype=torch.float32)
    x = torch.randn(sum(rows), 5, requires_grad=True)
    got = layer(x, list(rows))
    parts = x.split(rows)
    expected = torch.cat([part @ w.T for part, w in zip(parts, layer.parameters(), strict=True)])
    inputs = (x, *layer.parameters())
    return [got, *gradients(got, *inputs)], [expected, *gradients(expected, *inputs)]


def hadamard_transform(size=8):
    """Output and gradients of the transform, and of the matrix written out."""
    from fast_hadamard_transform import hadamard_transform

    torch.manual_seed(0)
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    x = torch.randn(3, 2, size, requires_grad=True)
    got, expected = hadamard_transform(x, scale=0.5), x @ matrix.T * 0.5
    return [got, *gradients(got, x)], [expected, *gradients(expected, x)]


def norm_beside_the_product():
    """The two outputs of a layer that is asked for its norm's, and of the layers taken apart."""
    from transformer_engine.pytorch import LayerNormLinear, RMSNorm

    torch.manual_seed(0)
    layer = LayerNormLinear(6, 10, normalization="RMSNorm", bias=False, params_dtype=torch.float32)
    layer.return_layernorm_output = True
    norm = RMSNorm(6, params_dtype=torch.float32)
    x = torch.randn(3, 2, 6, requires_grad=True)
    normal = norm(x)
    return list(layer(x)), [normal @ layer.weight.T, normal]


def recomputed_dropout():
    """Output and gradients of recomputed dropout from a named generator, and of kept dropout."""
    from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint

    x = torch.randn(8, 8, requires_grad=True)

    def run(call):
        tracker = CudaRNGStatesTracker()
        tracker.add("named", 1)

        def dropped(value):
            with tracker.fork("named"):
                return functional.dropout(value, 0.5) * value

        got = call(dropped, tracker)
        found = [got, *gradients(got, x)]
        return [*found, tracker.get_states()["named"].float()]

    def recompute(function, tracker):
        return checkpoint(function, x, get_rng_state_tracker=lambda: tracker)

    return run(recompute), run(lambda function, tracker: function(x))


def split_over_two_ranks(sequence_parallel):
    """A column-parallel and a row-parallel layer on this rank, and the same layers unsplit."""
    import torch.distributed as dist
    from transformer_engine.pytorch import LayerNormLinear, Linear

    group = dist.group.WORLD
    rank, size = group.rank(), group.size()
    torch.manual_seed(0)
    up_weight, down_weight = torch.randn(8, 6), torch.randn(6, 8)
    whole_x = torch.randn(4, 2, 6)

    split = {"tp_group": group, "tp_size": size, "sequence_parallel": sequence_parallel}
    settings = {"bias": False, "params_dtype": torch.float32, **split}
    up = LayerNormLinear(6, 8, normalization="RMSNorm", parallel_mode="column", **settings)
    down = Linear(8, 6, parallel_mode="row", **settings)
    with torch.no_grad():
        up.weight.copy_(up_weight.chunk(size, 0)[rank])
        down.weight.copy_(down_weight.chunk(size, 1)[rank])
    x = whole_x.chunk(size)[rank].clone() if sequence_parallel else whole_x.clone()
    x.requires_grad_()
    got = down(functional.silu(up(x)))
    got_gradients = gradients(got, x, up.weight, down.weight)

    whole_x.requires_grad_()
    up_weight.requires_grad_()
    down_weight.requires_grad_()
    normal = whole_x / (whole_x.pow(2).mean(-1, keepdim=True) + up.eps).sqrt()
    expected = functional.silu(normal @ up_weight.T) @ down_weight.T
    of_x, of_up, of_down = gradients(expected, whole_x, up_weight, down_weight)
    if sequence_parallel:
        expected, of_x = expected.chunk(size)[rank], of_x.chunk(size)[rank]
    of_up, of_down = of_up.chunk(size, 0)[rank], of_down.chunk(size, 1)[rank]
    return [got, *got_gradients], [expected, of_x, of_up, of_down]


def compared(case, arguments):
    """The largest difference of two lists of tensors that ``case`` returns."""
    got, expected = globals()[case](**arguments)
    assert [tensor.shape for tensor in got] == [tensor.shape for tensor in expected]
    return max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))


def compared_over_ranks(case, arguments):
    """As ``compared``, in a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return compared(case, arguments)


def refused(module, settings):
    """What making ``module`` raises."""
    from transformer_engine import pytorch

    try:
        getattr(pytorch, module)(**settings)
    except NotImplementedError as error:
        return str(error)
    return None
