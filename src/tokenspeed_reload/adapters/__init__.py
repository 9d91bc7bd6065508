"""How each kind of object is updated in place; a program can put its own adapters before these."""

from __future__ import annotations

from tokenspeed_reload.adapters.caches import CachedFunctionAdapter
from tokenspeed_reload.adapters.classes import ClassAdapter
from tokenspeed_reload.adapters.cute import CuteAdapter
from tokenspeed_reload.adapters.descriptors import MethodWrapperAdapter, PartialAdapter, PropertyAdapter
from tokenspeed_reload.adapters.dispatch import SingleDispatchAdapter
from tokenspeed_reload.adapters.enums import EnumAdapter
from tokenspeed_reload.adapters.functions import FunctionAdapter
from tokenspeed_reload.adapters.instances import InstanceAdapter
from tokenspeed_reload.adapters.torch import TorchAdapter
from tokenspeed_reload.adapters.triton import TritonAdapter
from tokenspeed_reload.merge import Adapter

__all__ = ["Adapter", "default_adapters"]


def default_adapters() -> list[Adapter]:
    """The adapters for what CPython and the known libraries offer, the special ones first."""
    return [
        SingleDispatchAdapter(),
        CuteAdapter(),
        FunctionAdapter(),
        EnumAdapter(),
        ClassAdapter(),
        CachedFunctionAdapter(),
        PropertyAdapter(),
        MethodWrapperAdapter(),
        PartialAdapter(),
        TritonAdapter(),
        TorchAdapter(),
        InstanceAdapter(),
    ]
