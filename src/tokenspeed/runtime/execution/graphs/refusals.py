"""What a captured step cannot do, and how the user is told."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import resolve_name

from tokenspeed.runtime.execution.graphs.base import CaptureError

# Reads that never pass through the dispatcher, so that only a function mode sees them.
_HOST_READS = frozenset(
    {
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.__deepcopy__,
    }
)
_SPELLED = {
    "aten.item.default": "tensor.item()",
    "aten.is_nonzero.default": "bool(tensor)",
    "aten.equal.default": "torch.equal()",
    "aten.allclose.default": "torch.allclose()",
}
_AWKWARD = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
)
_SCATTERS = (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
_OWN_DIRECTORY = str(Path(__file__).parent)
_LIBRARY_DIRECTORIES = (str(Path(torch.__file__).parent), _OWN_DIRECTORY)


def check_function(function: Any) -> None:
    """Refuse a torch function that reads tensor data on the host without an ATen op."""
    if function in _HOST_READS:
        raise _host_read(resolve_name(function) or function.__name__)


def check_op(name: str, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an ATen op whose result depends on data in a way that a captured step cannot repeat.

    `name` is what the user called; `op` may be a part of it.
    """
    tags = _awkward_tags(op)
    if torch.Tag.data_dependent_output in tags:
        raise _host_read(_SPELLED.get(name, name))
    if torch.Tag.dynamic_output_shape in tags and _has_dynamic_shape(op, args, kwargs):
        raise _error(f"{name} makes a tensor whose size depends on data")
    if torch.Tag.nondeterministic_seeded in tags and _draws(op, args, kwargs):
        raise _error(f"{name} draws from a random generator, whose state a replay does not advance")
    if op in _SCATTERS and _scatters_by_mask(args):
        raise _error(f"{name} with a boolean mask and more than one value reads the mask on the host")


def hidden_alias(op: str) -> CaptureError:
    """For a tensor whose memory the step made, but which no recorded operation returned."""
    return _error(f"{op} uses memory of the step through a tensor that was made outside the recorded operations")


def reshaped_buffer(op: str) -> CaptureError:
    """For an in-place change of the shape of a tensor that outlives the step."""
    return _error(f"{op} changes the shape or the memory of a tensor that lives longer than the step")


def hidden_argument(name: str, where: str) -> CaptureError:
    """For a launch that reaches a tensor of the step by another way than its arguments."""
    return _error(f"the launch of {name} reaches a tensor of the step through {where}; pass it as an argument")


def _host_read(operation: str) -> CaptureError:
    return _error(f"{operation} reads data on the host")


def _error(what: str) -> CaptureError:
    return CaptureError(f"{what}, which a captured step cannot do{_user_line()}; do it outside the step or in a launch")


def _user_line() -> str:
    """Where the step's own code stands: the innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARY_DIRECTORIES):
            return f" ({code.co_filename}:{frame.f_lineno or code.co_firstlineno} in {code.co_name})"
        frame = frame.f_back
    return ""


@cache
def _awkward_tags(op: torch._ops.OpOverload) -> frozenset[torch.Tag]:
    return _AWKWARD & set(op.tags)


def _has_dynamic_shape(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if op is torch.ops.aten.index.Tensor:
        return any(_is_mask(index) for index in args[1])
    return kwargs.get("output_size") is None


def _draws(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op is random with these arguments: attention is tagged so, but draws only for dropout."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return op is not torch.ops.aten._fused_sdp_choice.default


def _scatters_by_mask(args: tuple[Any, ...]) -> bool:
    return args[2].numel() != 1 and any(_is_mask(index) for index in args[1])


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
