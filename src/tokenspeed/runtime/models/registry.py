"""Which class serves which architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenspeed.errors import ModelError
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.config import ModelConfig
from tokenspeed.runtime.models.llama import LlamaForCausalLM
from tokenspeed.runtime.models.qwen3 import Qwen3ForCausalLM

if TYPE_CHECKING:
    from tokenspeed.runtime.distributed.group import Group

MODELS: Mapping[str, type[CausalLM]] = MappingProxyType(
    {"LlamaForCausalLM": LlamaForCausalLM, "Qwen3ForCausalLM": Qwen3ForCausalLM}
)


def build_model(config: ModelConfig, group: Group) -> CausalLM:
    """This rank's part of the model that `config` describes, on meta.

    Call `materialize`, `load_weights` and `plan` on it before it runs; the order of the last two is free.

    Raises:
        ModelError: the architecture is unknown.
        ConfigError: the model cannot be spread over so many ranks.
    """
    model = MODELS.get(config.architecture)
    if model is None:
        raise ModelError(f"{config.architecture} is not supported; use one of: {', '.join(MODELS)}")
    config.check_tensor_parallel(group.size)
    return model(config, group)
