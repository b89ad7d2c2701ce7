"""Checks before ATen operators that trust their arguments, because here a file chooses the arguments.

Most of ATen's operators check sizes before they touch memory. Operators whose names begin with an underscore or
"native", and kernels of some libraries, rely on the checks of the public operator that normally calls them. For those
that a program may call directly, the checks are here. Uninitialized memory is replaced with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported.values import SYMBOLIC_LARGEST

Function = Callable[..., Any]
Arguments = Mapping[str, Any]

_SMALLEST_SCALE, _LARGEST_SCALE = 1e-6, 1e6  # of resizing: a source position must fit a 64-bit integer
_MOST_REPEATED = 2**53  # sums of doubles are exact up to here
_LARGEST_SETTING = 2**31  # of a window's settings
_GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}
_QUOTIENTS = ("div", "div_", "floor_divide", "floor_divide_", "fmod", "remainder", "remainder_")


def with_argument_checks(name: str, operator: torch._ops.OpOverload, function: Function) -> Function:
    """Wrap ``function``, which calls ATen's ``operator`` called ``name``, in the checks that it needs.

    The wrapped function raises :class:`RuntimeFailure` for arguments that do not fit together.
    """
    check = _CHECKS.get(name)
    if check is None and name.startswith(("upsample_", "_upsample_")):
        check = _antialiased_scales if name.endswith("_aa") else _scales_in_range
    replacement = _REPLACEMENTS.get(name)
    if operator._overloadname.startswith("prim_"):  # TorchScript's own overloads, which take dtypes as numbers
        raise RuntimeFailure(f"uses the operator {str(operator)!r}, which torch.export never writes")
    arguments = operator._schema.arguments
    enum_arguments = [(position, each.name) for position, each in enumerate(arguments) if _is_enum_argument(each)]
    if check is None and replacement is None and not enum_arguments:
        return function
    names = [argument.name for argument in arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        for position, keyword in enum_arguments:  # torch accepts any number and does not check that it is a dtype
            if isinstance(args[position] if position < len(args) else kwargs.get(keyword), int | float | torch.SymInt):
                raise RuntimeFailure(f"the arguments of {name} do not fit together")
        if check is not None:
            try:
                fits = check({**dict(zip(names, args, strict=False)), **kwargs}, name)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
                fits = False  # an argument is missing, or has another type
            if not fits:
                raise RuntimeFailure(f"the arguments of {name} do not fit together")
        return function(*args, **kwargs) if replacement is None else replacement(function, *args, **kwargs)

    return run


def _is_enum_argument(argument: Any) -> bool:
    return any(kind in str(argument.real_type) for kind in ("ScalarType", "MemoryFormat", "Layout"))


def _batch_norm(arguments: Arguments, name: str) -> bool:
    channels = arguments["input"].shape[1]
    found = [arguments.get(key) for key in ("weight", "bias", "running_mean", "running_var")]
    training = name != "_native_batch_norm_legit_no_training" and arguments["training"] is not False
    fits = all(tensor is None or tuple(tensor.shape) == (channels,) for tensor in found)
    return fits and (training or (found[2] is not None and found[3] is not None))


def _group_norm(arguments: Arguments, _name: str) -> bool:
    tensor, channels, groups = arguments["input"], arguments["C"], arguments["group"]
    return bool(
        groups > 0
        and channels % groups == 0
        and (tensor.shape[0], tensor.shape[1]) == (arguments["N"], channels)
        and math.prod(tensor.shape[2:]) == arguments["HxW"]
        and all(each is None or tuple(each.shape) == (channels,) for each in (arguments["weight"], arguments["bias"]))
    )


def _weight_norm(arguments: Arguments, name: str) -> bool:
    direction, length, dim = arguments["v"], arguments["g"], arguments.get("dim", 0)
    if dim not in (0, direction.dim() - 1):
        return name == "_weight_norm"  # implemented with other operators, which check
    return bool(
        length.dtype is direction.dtype
        and direction.dim() == length.dim() > 0
        and all(size == (direction.shape[axis] if axis == dim else 1) for axis, size in enumerate(length.shape))
    )


def _attention(arguments: Arguments, name: str) -> bool:
    query, key, value, mask = arguments["query"], arguments["key"], arguments["value"], arguments.get("attn_mask")
    fits = query.shape[-1] == key.shape[-1] and key.shape[-2] == value.shape[-2]
    if name.endswith("for_cpu"):
        fits = fits and query.dim() == key.dim() == value.dim() == 4 and value.shape[-1] == query.shape[-1]
        fits = fits and query.shape[:2] == key.shape[:2] == value.shape[:2]
        fits = fits and min(query.shape[1], query.shape[2], key.shape[2]) > 0  # the kernel divides by these sizes
        fits = fits and (mask is None or mask.dim() in (2, 4))
    if mask is not None:
        expected = (*query.shape[:-1], key.shape[-2])
        fits = fits and mask.dim() <= len(expected)
        pairs = zip(reversed(mask.shape), reversed(expected), strict=False)
        fits = fits and all(size == 1 or size == most for size, most in pairs)
    return bool(fits)


def _recurrent(arguments: Arguments, name: str) -> bool:
    """Check the sizes of weights and states, which the CPU kernel does not check."""
    packed = "data" in arguments
    tensor, states = arguments["data" if packed else "input"], arguments["hx"]
    states = list(states) if isinstance(states, list | tuple) else [states]
    directions = 2 if arguments["bidirectional"] else 1
    width, hidden, layers = states[0].shape[-1], states[-1].shape[-1], arguments["num_layers"]
    rows = _GATES[name] * hidden
    if not 0 < layers <= len(arguments["params"]):
        return False
    sizes: list[tuple[Any, ...]] = []
    for layer in range(layers):
        for _ in range(directions):
            sizes += [(rows, tensor.shape[-1] if layer == 0 else width * directions), (rows, width)]
            sizes += [(rows,), (rows,)] if arguments["has_biases"] else []
            sizes += [(width, hidden)] if width != hidden else []
    batch = states[0].shape[1] if packed else tensor.shape[0 if arguments["batch_first"] else 1]
    return (
        (not packed or _packed_batch_sizes(arguments["batch_sizes"], tensor, batch))
        and len(states) == (2 if name == "lstm" else 1)
        and tensor.dim() == (2 if packed else 3)
        and len(sizes) == len(arguments["params"])
        and all(tuple(each.shape) == size for each, size in zip(arguments["params"], sizes, strict=True))
        and all(tuple(each.shape[:2]) == (layers * directions, batch) and each.dim() == 3 for each in states)
        and all(each.dtype is tensor.dtype for each in (*arguments["params"], *states))
    )


def _packed_batch_sizes(sizes: torch.Tensor, tensor: torch.Tensor, batch: int) -> bool:
    """Check ``sizes``, the sequences at each step: positive, not increasing, adding up to the rows of ``tensor``."""
    if not _is_real_tensor(sizes):
        return True
    if sizes.dim() != 1 or sizes.numel() == 0 or sizes.dtype is not torch.int64:
        return False
    counts: list[int] = sizes.tolist()
    return (
        counts == sorted(counts, reverse=True) and counts[-1] > 0 and (counts[0], sum(counts)) == (batch, len(tensor))
    )


def _grid_sampler_modes(arguments: Arguments, _name: str) -> bool:
    return arguments["interpolation_mode"] in (0, 1, 2) and arguments["padding_mode"] in (0, 1, 2)


def _scales_in_range(arguments: Arguments, _name: str) -> bool:
    found = [value for key, value in arguments.items() if key.startswith("scale") and value is not None]
    flat = [each for value in found for each in (value if isinstance(value, list | tuple) else [value])]
    return all(_SMALLEST_SCALE <= each <= _LARGEST_SCALE for each in flat if each is not None)


def _antialiased_scales(arguments: Arguments, name: str) -> bool:
    """Check that the output is no larger than the scales allow: smaller scales would read beyond the source."""
    if not _scales_in_range(arguments, name) or "scale_factors" in arguments or not _is_real_tensor(arguments["self"]):
        return _scales_in_range(arguments, name)  # a scale without a size determines the size itself
    scales = (arguments.get("scales_h"), arguments.get("scales_w"))
    sizes = zip(arguments["self"].shape[2:], arguments["output_size"], scales, strict=True)
    return all(scale is None or size <= source * scale + 1 for source, size, scale in sizes)


def _repeat_counts(arguments: Arguments, _name: str) -> bool:
    """Check that repeats are not negative and their sum is not too large; torch notices that only while it writes."""
    repeats = arguments["repeats"]
    if not _is_real_tensor(repeats):
        return True
    return repeats.numel() == 0 or (int(repeats.min()) >= 0 and float(repeats.double().sum()) < _MOST_REPEATED)


def _window_sizes(arguments: Arguments, _name: str) -> bool:
    """Check that the windows' elements can be counted in 64 bits: torch multiplies these sizes itself."""
    tensor, kernel = arguments["self"], arguments["kernel_size"]
    if not _is_real_tensor(tensor):
        return True
    settings = list(zip(kernel, arguments["dilation"], arguments["padding"], arguments["stride"], strict=True))
    if not all(0 <= value <= _LARGEST_SETTING for setting in settings for value in setting):
        return False
    places = [
        (size + 2 * padding - dilation * (width - 1) - 1) // stride + 1
        for size, (width, dilation, padding, stride) in zip(
            arguments.get("output_size", tensor.shape[-2:]), settings, strict=True
        )
    ]
    return bool(math.prod(places) * math.prod(kernel) * math.prod(tensor.shape[:-2]) <= SYMBOLIC_LARGEST)


def _quotient(arguments: Arguments, _name: str) -> bool:
    """Reject the smallest integer divided by -1, which kills the process."""
    dividend, divisor = arguments["self"], arguments["other"]
    if not _is_real_tensor(dividend) or dividend.is_floating_point():
        return True
    if isinstance(divisor, torch.Tensor):
        if not _is_real_tensor(divisor) or divisor.is_floating_point():
            return True
        smallest = {torch.iinfo(each.dtype).min for each in (dividend, divisor) if each.dtype is not torch.bool}
        has_minus_one = bool((divisor == -1).any())
    else:
        smallest, has_minus_one = (
            {torch.iinfo(dividend.dtype).min} if dividend.dtype is not torch.bool else set(),
            divisor == -1,
        )
    return not has_minus_one or not any(bool((dividend == each).any()) for each in smallest if each)


def _is_real_tensor(value: Any) -> bool:
    """Return whether ``value`` is a real tensor; a stand-in used during export has no numbers."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _single_element(arguments: Arguments, _name: str) -> bool:
    return bool(arguments["self"].numel() == 1)


def _embedding_bag_offsets(arguments: Arguments, _name: str) -> bool:
    offsets = arguments["offsets"]
    if not _is_real_tensor(offsets):
        return True
    return offsets.dim() == 1 and bool((offsets.diff() >= 0).all())


def _zeroed(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs).zero_()


def _zeroed_strided(_function: Function, size: Any, stride: Any, **kwargs: Any) -> Any:
    """Return zeros for everything that the strides reach, gaps included."""
    if len(size) != len(stride) or min((*size, *stride), default=0) < 0:
        raise RuntimeFailure("the arguments of empty_strided do not fit together")
    reached = 1 + sum((each - 1) * step for each, step in zip(size, stride, strict=True)) if math.prod(size) else 0
    return torch.zeros(reached, **kwargs).as_strided(size, stride)


def _on_contiguous_copy(function: Function, into: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(into.contiguous(), *args, **kwargs)  # do not copy the memory between its elements


def _first_result_only(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Return only the first result: the others are not filled in in every mode, so a program that reads them fails."""
    return function(*args, **kwargs)[0], None, None, None


def _cdist(_function: Function, *args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten.cdist.default(*args, **kwargs)


def _pdist(_function: Function, *args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten.pdist.default(*args, **kwargs)


_CHECKS: Mapping[str, Callable[[Arguments, str], bool]] = {
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_group_norm": _group_norm,
    "_weight_norm": _weight_norm,
    "_weight_norm_interface": _weight_norm,
    "scaled_dot_product_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "grid_sampler": _grid_sampler_modes,
    "grid_sampler_2d": _grid_sampler_modes,
    "_local_scalar_dense": _single_element,
    "repeat_interleave": _repeat_counts,
    "im2col": _window_sizes,
    "col2im": _window_sizes,
    **dict.fromkeys(_QUOTIENTS, _quotient),
    "embedding_bag": _embedding_bag_offsets,
    "_embedding_bag": _embedding_bag_offsets,
    **dict.fromkeys(_GATES, _recurrent),
}
_REPLACEMENTS: Mapping[str, Function] = {
    "empty": _zeroed,
    "empty_like": _zeroed,
    "empty_permuted": _zeroed,
    "new_empty": _zeroed,
    "empty_strided": _zeroed_strided,
    "copy": _on_contiguous_copy,
    "embedding_bag": _first_result_only,
    "_embedding_bag": _first_result_only,
    "_cdist_forward": _cdist,
    "_pdist_forward": _pdist,
}
