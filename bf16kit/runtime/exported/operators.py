"""The operators that a torch.export program may use: ATen's, by name, that compute tensors from tensors and numbers.

This is a list of what is allowed, not of what is forbidden: ATen has operators that open files (``from_file``), and
torch's own loader resolves any name in torch's modules, such as ``torch.os.system``. An operator that is missing here
is rejected by name.
"""

from __future__ import annotations

ATEN = frozenset(
    """
    __and__ __or__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward _conj _convolution
    _embedding_bag _local_scalar_dense _log_softmax _native_batch_norm_legit _native_batch_norm_legit_no_training
    _pdist_forward _prelu_kernel _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu
    _shape_as_tensor _softmax _to_copy _unsafe_index _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _weight_norm _weight_norm_interface abs acos acosh
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv alias all alpha_dropout amax amin angle any arange
    arctan argmax argmin argsort as_strided asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d
    avg_pool2d avg_pool3d baddbmm batch_norm bilinear bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor block_diag bmm broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist
    ceil celu channel_shuffle chunk clamp clamp_max clamp_min clip clone col2im column_stack concat constant_pad_nd
    contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copysign cos
    cosh cosine_similarity count_nonzero cross cummax cummin cumprod cumsum deg2rad detach diag diag_embed diagonal
    diff digamma div dot dropout dstack einsum elu embedding embedding_bag empty empty_like empty_permuted
    empty_strided eq equal erf erfc erfinv exp exp2 expand expand_as expm1 eye fill flatten flip fliplr flipud
    float_power floor floor_divide fmax fmin fmod frac full full_like gather ge gelu glu greater greater_equal
    grid_sampler grid_sampler_2d group_norm gru gru_cell gt hardshrink hardsigmoid hardswish hardtanh heaviside
    hstack hypot im2col index index_add index_copy index_fill index_put index_select inner instance_norm isclose
    isfinite isin isinf isnan isneginf isposinf item kthvalue layer_norm ldexp le leaky_relu lerp less less_equal
    lgamma lift_fresh lift_fresh_copy linalg_cross linalg_norm linalg_vector_norm linear linspace log log10 log1p
    log2 log_sigmoid log_softmax logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logspace
    logsumexp lstm lstm_cell lt masked_fill masked_scatter masked_select matmul max max_pool1d max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices maximum mean median meshgrid min minimum mish mm
    moveaxis movedim mul multiply mv nan_to_num nanmean nansum narrow native_batch_norm native_dropout
    native_group_norm native_layer_norm ne neg new_empty new_full new_ones new_zeros nonzero norm not_equal numel
    one_hot ones ones_like outer pad permute pixel_shuffle pixel_unshuffle polar positive pow prelu prod quantile
    rad2deg ravel reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape reshape_as rms_norm rnn_relu
    rnn_tanh roll rot90 round rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add
    scatter_reduce searchsorted select select_scatter selu sgn sigmoid sign signbit silu sin sinc sinh size slice
    slice_scatter softmax softplus softshrink sort special_erf special_expit special_log_softmax special_logit
    special_softmax split split_copy split_with_sizes split_with_sizes_copy sqrt square squeeze stack std std_mean
    stft sub subtract sum swapaxes swapdims sym_numel sym_size sym_storage_offset sym_stride t take take_along_dim
    tan tanh tensor_split tensordot threshold tile to topk transpose trapezoid tril tril_indices triu triu_indices
    true_divide trunc type_as unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d var var_mean view view_as vstack where xlogy zeros zeros_like
    """.split()  # noqa: SIM905 - words are read more easily than a list of quoted ones
)

# Operators whose result is always a number or in memory of its own. Operators missing here count as returning a part of
# their arguments: views, those that may return their argument unchanged (to, dropout), and those that were not
# examined.
FRESH = frozenset(
    """
    __and__ __or__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward _convolution _local_scalar_dense
    _log_softmax _native_batch_norm_legit_no_training _pdist_forward _prelu_kernel
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _softmax _to_copy _unsafe_index
    abs acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv all amax amin any arange arctan
    argmax argmin argsort asin asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d baddbmm batch_norm bilinear
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm bucketize cat ceil
    celu clamp clamp_max clamp_min clip clone col2im concat constant_pad_nd conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d convolution copy copysign cos cosh cosine_similarity count_nonzero cummax
    cummin cumprod cumsum diag_embed digamma div dot elu embedding empty empty_like empty_permuted empty_strided eq
    equal erf erfc erfinv exp exp2 expm1 eye fill flip float_power floor floor_divide fmax fmin fmod frac full
    full_like gather ge gelu glu greater greater_equal grid_sampler grid_sampler_2d group_norm gru gru_cell gt
    hardshrink hardsigmoid hardswish hardtanh heaviside hypot im2col index index_add index_copy index_fill index_put
    index_select instance_norm isclose isfinite isin isinf isnan isneginf isposinf item layer_norm ldexp le
    leaky_relu lerp less less_equal lgamma lift_fresh_copy linalg_cross linalg_vector_norm linear linspace log log10
    log1p log2 log_sigmoid log_softmax logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    logspace logsumexp lstm lstm_cell lt masked_fill masked_scatter masked_select matmul max max_pool1d max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices maximum mean min minimum mish mm mul multiply mv
    nan_to_num nansum native_group_norm native_layer_norm ne neg new_empty new_full new_ones new_zeros nonzero
    not_equal numel one_hot ones ones_like outer polar pow prelu prod reciprocal reflection_pad1d reflection_pad2d
    reflection_pad3d relu relu6 remainder repeat replication_pad1d replication_pad2d replication_pad3d rms_norm
    round rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted
    select_scatter selu sgn sigmoid sign signbit silu sin sinc sinh size slice_scatter softmax softplus softshrink
    sort special_erf special_expit special_log_softmax special_logit special_softmax split_copy
    split_with_sizes_copy sqrt square stack std std_mean sub subtract sum sym_numel sym_size sym_storage_offset
    sym_stride take_along_dim tan tanh threshold topk tril tril_indices triu triu_indices true_divide trunc
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d var var_mean vstack where xlogy zeros zeros_like
    """.split()  # noqa: SIM905 - words are read more easily than a list of quoted ones
)

# Norms that write into their running statistics when the named argument is true.
RUNNING = {
    "batch_norm": "training",
    "native_batch_norm": "training",
    "_native_batch_norm_legit": "training",
    "instance_norm": "use_input_stats",
}

# In-place operators; the tensor that they write into must be the program's own: see aliases.py.
IN_PLACE = frozenset(
    """
    abs_ add_ addcdiv_ addcmul_ addmm_ baddbmm_ bitwise_and_ bitwise_not_ bitwise_or_ ceil_ celu_ clamp_ clamp_max_
    clamp_min_ copy_ cos_ cumsum_ detach_ div_ dropout_ elu_ eq_ erf_ exp_ fill_ fill_diagonal_ floor_ floor_divide_ ge_
    gt_ hardsigmoid_ hardswish_ hardtanh_ index_add_ index_copy_ index_fill_ index_put_ le_ leaky_relu_ lerp_ log_
    logical_and_ logical_not_ logical_or_ lt_ masked_fill_ masked_scatter_ mish_ mul_ nan_to_num_ ne_ neg_ pow_
    reciprocal_ relu6_ relu_ remainder_ round_ rsqrt_ scatter_ scatter_add_ selu_ sigmoid_ sign_ silu_ sin_ sqrt_
    square_ squeeze_ sub_ t_ tanh_ threshold_ transpose_ tril_ triu_ unsqueeze_ zero_
    """.split()  # noqa: SIM905 - words are read more easily than a list of quoted ones
)

# Arithmetic on sizes: functions of Python's or torch's module. Without pow and shifts, whose integers may grow without
# bound.
_OPERATOR = (
    "add",
    "and_",
    "eq",
    "floordiv",
    "ge",
    "gt",
    "le",
    "lt",
    "mod",
    "mul",
    "ne",
    "neg",
    "or_",
    "pos",
    "sub",
    "truediv",
)
_TORCH = ("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt")
SYMBOLIC = frozenset(
    (*(f"_operator.{name}" for name in _OPERATOR), *(f"torch.{name}" for name in _TORCH), "math.trunc")
)

# Checks that the author or torch put into the program. They compute nothing and held at export, so they are skipped.
CHECKS = frozenset(
    (
        "_assert_async",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    )
)

GRAD_MODE = "torch.ops.higher_order.wrap_with_set_grad_enabled"
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"
