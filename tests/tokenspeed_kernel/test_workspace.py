"""Scratch memory is planned while a rank starts, and what needs more later is told by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_kernel.workspace import ALIGNMENT, Workspace, WorkspaceError

CPU = torch.device("cpu")
arrays = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.int32, torch.bfloat16, torch.int64]),
    ),
    min_size=1,
    max_size=4,
)


@given(arrays)
def test_arrays_are_as_asked_for_aligned_and_apart(wanted: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    found = Workspace().take("kernel", CPU, *wanted)
    assert [(tuple(array.shape), array.dtype) for array in found] == wanted
    for number, array in enumerate(found):
        assert (array.storage_offset() * array.itemsize) % ALIGNMENT == 0
        array.fill_(number)
    assert all((array == number).all() for number, array in enumerate(found))


def test_who_needs_more_than_was_planned_is_named() -> None:
    workspace = Workspace()
    workspace.take("small", CPU, ((4,), torch.float32), at_least=1024)
    assert workspace.freeze(CPU) == 1024
    workspace.take("other", CPU, ((256,), torch.float32))
    with pytest.raises(WorkspaceError, match=r"attention.mine needs a workspace of 2048 bytes .* planned 1024"):
        workspace.take("attention.mine", CPU, ((512,), torch.float32))


def test_another_engine_plans_anew_and_leaves_captured_memory_alone() -> None:
    workspace = Workspace()
    (captured,) = workspace.take("kernel", CPU, ((256,), torch.float32))
    captured.fill_(7)
    workspace.freeze(CPU)
    workspace.reopen(CPU)
    workspace.take("kernel", CPU, ((4096,), torch.float32))[0].fill_(1)
    assert (captured == 7).all()
    assert workspace.freeze(CPU) == 4 * 4096


def test_a_device_that_planned_nothing_has_nothing() -> None:
    workspace = Workspace()
    assert workspace.freeze(CPU) == 0
    with pytest.raises(WorkspaceError, match=r"late needs .* planned 0; restart the server"):
        workspace.take("late", CPU, ((1,), torch.float32))
