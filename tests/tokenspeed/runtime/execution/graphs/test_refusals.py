"""A step that a graph cannot repeat is refused with the line that does it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.runtime.execution.graphs.base import CaptureError
from tokenspeed.runtime.execution.graphs.cpu import CpuGraphBackend
from tokenspeed_kernel.launch import launch

HOST_READS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x[0, 0].item(), r"tensor\.item\(\)"),
    "bool": (lambda x: 1 if x[0, 0] > 0 else 2, r"bool\(tensor\)"),
    "int": (lambda x: int(x[0, 0]), r"tensor\.item\(\)"),
    "float": (lambda x: float(x[0, 0]), r"tensor\.item\(\)"),
    "index": (lambda x: [1, 2, 3][x[0, 0].long() * 0], r"tensor\.item\(\)"),
    "tolist": (lambda x: x.tolist(), r"tolist"),
    "numpy": (lambda x: x.numpy(), r"numpy"),
    "asarray": (lambda x: np.asarray(x), r"__array__"),
    "print": (lambda x: print(x), r"__(repr|format)__"),
    "format": (lambda x: f"{x[0, 0]:.2f}", r"__format__"),
    "dlpack": (lambda x: x.__dlpack__(), r"__dlpack__"),
    "equal": (lambda x: torch.equal(x, x), r"torch\.equal\(\)"),
    "allclose": (lambda x: torch.allclose(x, x), r"torch\.allclose\(\)"),
    "contains": (lambda x: 1.0 in x, r"tensor\.item\(\)"),
    "max of Python": (lambda x: max(x[0]), r"bool\(tensor\)"),
    "slice": (lambda x: x[: torch.tensor(1)], r"tensor\.item\(\)"),
}
DATA_SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: torch.unique(x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long), dim=0),
    "bincount": lambda x: torch.bincount(x.view(-1).long()),
}
RANDOM: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: torch.rand(3),
    "randn_like": lambda x: torch.randn_like(x),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 1),
    "exponential": lambda x: torch.empty(3).exponential_(),
    "attention dropout": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
}


def refused(step: Callable[[], Any]) -> str:
    with pytest.raises(CaptureError) as info:
        CpuGraphBackend(()).capture(step, label="test")
    message = str(info.value)
    assert "which a captured step cannot do" in message
    return message


def assert_names_this_file(message: str) -> None:
    assert f"({__file__}:" in message


@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads(name: str) -> None:
    x = torch.ones(4, 4)
    read, pattern = HOST_READS[name]
    message = refused(lambda: read(x))
    assert "reads data on the host" in message
    assert re.search(pattern, message)
    assert_names_this_file(message)


@pytest.mark.parametrize("name", DATA_SHAPES)
def test_shapes_that_depend_on_data(name: str) -> None:
    x = torch.ones(4, 4)
    message = refused(lambda: DATA_SHAPES[name](x))
    assert "whose size depends on data" in message
    assert_names_this_file(message)


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers(name: str) -> None:
    x = torch.ones(4, 4)
    message = refused(lambda: RANDOM[name](x))
    assert "random generator" in message
    assert_names_this_file(message)


def test_assignment_of_many_values_by_mask() -> None:
    x = torch.ones(4, 4)
    assert "boolean mask" in refused(lambda: x.__setitem__(x > 0, torch.ones(16)))


def test_a_buffer_that_changes_its_shape() -> None:
    x = torch.ones(4, 4)
    assert "lives longer than the step" in refused(lambda: x.unsqueeze_(0))
    assert x.shape == (4, 4)


def test_memory_that_leaves_the_recorded_operations() -> None:
    x, out = torch.ones(4), torch.zeros(4)
    message = refused(lambda: out.copy_(torch.nn.Parameter(x + 1)))
    assert "made outside the recorded operations" in message


def test_a_kernel_that_closes_over_a_tensor_of_the_step() -> None:
    x = torch.ones(4)

    def step() -> None:
        y = x + 1
        launch("k", lambda: y * 2)

    assert "reaches a tensor of the step through its closure" in refused(step)


def test_a_kernel_whose_object_holds_a_tensor_of_the_step() -> None:
    class Holder:
        def run(self) -> Tensor:
            return self.y * 2

    x, holder = torch.ones(4), Holder()

    def step() -> None:
        holder.y = x + 1
        launch("k", holder.run)

    assert "the attribute y of a Holder" in refused(step)


def test_after_a_refusal_nothing_is_installed() -> None:
    x = torch.ones(2)
    refused(lambda: x.tolist())
    assert x.tolist() == [1.0, 1.0]
    assert x[x > 0].sum().item() == 2.0
