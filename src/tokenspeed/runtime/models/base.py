"""What all models share: plans, memory for weights, and loading them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from tokenspeed.errors import ModelError
from tokenspeed.runtime.layers.base import Layer, StoredWeight, WeightSlot
from tokenspeed.runtime.layers.context import ForwardContext
from tokenspeed.runtime.models.config import ModelConfig

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Checkpoint tensors that hold nothing which a model does not compute itself."""


class CausalLM(nn.Module, ABC):
    """A decoder-only language model, or one rank's part of it. It is built without memory, on meta."""

    config: ModelConfig

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """int64 [tokens] ids and positions to hidden states [tokens, hidden_size]; writes the step's KV."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] to [rows, vocab_size], of the model's dtype."""

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Every layer once, with its path."""
        return ((path, module) for path, module in self.named_modules() if isinstance(module, Layer))

    def plan(self, device: torch.device, dtype: torch.dtype) -> None:
        """Choose kernels and build tables in every layer; may run again."""
        for _, layer in self.named_layers():
            layer.plan(device, dtype)

    def weight_forms(self, dtype: torch.dtype) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of every parameter by its path: `dtype`, or the type that it keeps."""
        return {
            f"{path}.{name}": (parameter.shape, parameter.dtype if name in layer.fixed_types else dtype)
            for path, layer in self.named_layers()
            for name, parameter in layer.named_parameters(recurse=False)
        }

    def materialize(self, device: torch.device, dtype: torch.dtype, memory: Mapping[str, Tensor] | None = None) -> None:
        """Give every parameter memory on `device`, uninitialised, or that of `memory`, where it has its path.

        Args:
            device: where the model runs.
            dtype: of what keeps no type of its own.
            memory: tensors of the shapes and types of `weight_forms`.
        """
        given = memory or {}
        forms = self.weight_forms(dtype)
        for path, layer in self.named_layers():
            for name, _ in list(layer.named_parameters(recurse=False)):
                shape, kind = forms[f"{path}.{name}"]
                tensor = given.get(f"{path}.{name}")
                if tensor is None:
                    tensor = torch.empty(shape, dtype=kind, device=device)
                setattr(layer, name, nn.Parameter(tensor, requires_grad=False))

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory that `materialize` takes."""
        return sum(shape.numel() * kind.itemsize for shape, kind in self.weight_forms(dtype).values())

    def weight_slots(self) -> dict[str, tuple[Layer, WeightSlot]]:
        """The checkpoint tensors that this model needs, by name, each with the layer that takes it."""
        return {
            ".".join(filter(None, (_source_path(path, slot), slot.parameter))): (layer, slot)
            for path, layer in self.named_layers()
            for slot in layer.slots()
        }

    def load_weights(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        """Copy this rank's part of every checkpoint tensor, named as in the Hugging Face checkpoint.

        Raises:
            ModelError: a tensor is missing, unknown or of another shape than the configuration says.
        """
        slots = self.weight_slots()
        missing = dict.fromkeys(slots)
        unknown = []
        for name, weight in weights:
            if name in slots:
                layer, slot = slots[name]
                if tuple(weight.shape) != slot.shape:
                    raise ModelError(
                        f"the weight {name} has shape {list(weight.shape)} where config.json asks for "
                        f"{list(slot.shape)}; use the config.json that belongs to these weights"
                    )
                layer.load(slot, weight)
                missing.pop(name, None)
            elif not self.ignores(name):
                unknown.append(name)
        _refuse("the checkpoint lacks weights that the model needs", list(missing), self.config.architecture)
        _refuse("the checkpoint has weights that the model does not know", unknown, self.config.architecture)
        self.process()

    def process(self) -> None:
        """Bring the loaded weights into the form that the kernels want, in every layer."""
        for _, layer in self.named_layers():
            layer.process()

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor that no layer takes is no error."""
        return name.endswith(IGNORED_SUFFIXES) or (self.config.tie_embeddings and name == "lm_head.weight")


def _source_path(path: str, slot: WeightSlot) -> str:
    if not slot.source:
        return path
    parent, dot, _ = path.rpartition(".")
    return parent + dot + slot.source


def _refuse(problem: str, names: list[str], architecture: str) -> None:
    if names:
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ModelError(f"{problem}: {some}; use a complete checkpoint of {architecture}")
