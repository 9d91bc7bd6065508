"""What a model's config.json says, checked and in our names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenspeed.errors import ConfigError, ModelError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose configuration is understood here; `models.registry` has a class for each."""

DTYPES = ("float32", "bfloat16", "float16")

FP8_BLOCK = 128
"""Rows and columns of a block of float8 weights, as the kernels have it."""

_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder-only transformer; sizes are those of the whole model, not of a rank."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    """None, or a mapping with `rope_type` linear or llama3 and that type's numbers."""
    max_position: int = 2048
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    torch_dtype: str = "float32"
    """Type of the checkpoint's weights: float32, bfloat16 or float16."""
    block_fp8: bool = False
    """The weights of linear layers are float8 with a scale for each block; those of embeddings and norms are not."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json, as transformers 5 or an earlier version writes it.

        Raises:
            ModelError: for a field that is missing, contradicts another, or asks for what is not supported.
        """
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        hidden_size = _size(raw, "hidden_size")
        num_heads, num_kv_heads, head_dim = _heads(raw, hidden_size)
        rope_theta, rope_scaling = _rope(raw)
        return cls(
            architecture=architecture,
            model_type=str(raw.get("model_type") or ""),
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=_size(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position=_size(raw, "max_position_embeddings", 2048),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            bos_token_id=next(iter(_token_ids(raw.get("bos_token_id"))), None),
            pad_token_id=next(iter(_token_ids(raw.get("pad_token_id"))), None),
            torch_dtype=_dtype(raw),
            block_fp8=_block_fp8(raw),
        )

    def local_kv_heads(self, ranks: int) -> int:
        """KV heads that each of `ranks` tensor-parallel ranks holds; more ranks than heads hold copies."""
        return max(1, self.num_kv_heads // ranks)

    def check_tensor_parallel(self, ranks: int) -> None:
        """Refuse a number of ranks over which the model cannot be spread.

        Raises:
            ConfigError: naming the numbers that would work.
        """
        if not self._divides(ranks):
            sizes = ", ".join(str(size) for size in range(1, self.num_heads + 1) if self._divides(size))
            blocks = f" in float8 blocks of {FP8_BLOCK}" if self.block_fp8 else ""
            advice = f"use one of: {sizes}" if sizes else "use an unquantised checkpoint"
            raise ConfigError(
                f"--tensor-parallel-size {ranks} does not fit {self.num_heads} attention heads, "
                f"{self.num_kv_heads} KV heads and an MLP of {self.intermediate_size}{blocks}; {advice}"
            )

    def _divides(self, ranks: int) -> bool:
        kv_heads = self.num_kv_heads % ranks == 0 or ranks % self.num_kv_heads == 0
        fits = kv_heads and self.num_heads % ranks == 0 and self.intermediate_size % ranks == 0
        return fits and (not self.block_fp8 or self._keeps_blocks(ranks))

    def _keeps_blocks(self, ranks: int) -> bool:
        """Whether a rank's queries, keys, values, gates and ups each begin and end with a block.

        They are merged, so that this matters for one rank as well.
        """
        sizes = (
            self.num_heads // ranks * self.head_dim,
            self.local_kv_heads(ranks) * self.head_dim,
            self.intermediate_size // ranks,
        )
        return not any(size % FP8_BLOCK for size in sizes)


def _architecture(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    for name in architectures:
        if name in ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, architectures)) or "no architecture"
    raise ModelError(f"config.json names {found}; use a model of one of: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json has hidden_act {activation}; only models with silu are supported")
    kinds = raw.get("layer_types") or ()
    if raw.get("use_sliding_window") or any(kind != "full_attention" for kind in kinds):
        raise ModelError("config.json asks for attention in a sliding window; only full attention is supported")


def _block_fp8(raw: Mapping[str, Any]) -> bool:
    """Whether the linear layers are float8 with a scale for each block of 128 by 128; other forms are refused."""
    form = raw.get("quantization_config")
    if not form:
        return False
    method = form.get("quant_method", "an unnamed method")
    if method != "fp8":
        raise ModelError(f"the checkpoint is quantised with {method}; use an unquantised one, block-scaled fp8 or GGUF")
    if list(form.get("weight_block_size") or ()) != [FP8_BLOCK, FP8_BLOCK] or form.get("fmt", "e4m3") != "e4m3":
        raise ModelError(
            f"the checkpoint has fp8 weights in blocks of {form.get('weight_block_size')}; "
            "use one with e4m3 in blocks of 128 by 128, or an unquantised one"
        )
    dense = [name for name in form.get("modules_to_not_convert") or () if str(name).endswith("_proj")]
    if dense:
        raise ModelError(
            f"the checkpoint leaves {dense[0]} unquantised; use one whose linear layers all are fp8, or none"
        )
    return True


def _heads(raw: Mapping[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Attention heads, KV heads, and the dimensions of a head."""
    num_heads = _size(raw, "num_attention_heads")
    num_kv_heads = _size(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json has {num_heads} attention heads and {num_kv_heads} KV heads; "
            "the first must be a multiple of the second"
        )
    if raw.get("head_dim") is None and raw.get("model_type") == "qwen3":
        # What transformers takes for a Qwen3 that does not say.
        return num_heads, num_kv_heads, 128
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(f"config.json needs head_dim, since {num_heads} heads do not divide hidden_size {hidden_size}")
    head_dim = _size(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"config.json has head_dim {head_dim}; rotary embedding needs an even number")
    return num_heads, num_kv_heads, head_dim


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = _number({"rope_theta": rope.get("rope_theta", raw.get("rope_theta"))}, "rope_theta", 10000.0)
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json has partial_rotary_factor {partial}; only 1 is supported")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in _ROPE_NUMBERS:
        raise ModelError(f"config.json has RoPE scaling of type {rope_type}; supported are {', '.join(_ROPE_NUMBERS)}")
    if rope_type == "default":
        return theta, None
    if "original_max_position_embeddings" not in rope and "original_max_position_embeddings" in raw:
        rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    scaling: dict[str, Any] = {name: _number(rope, name) for name in _ROPE_NUMBERS[rope_type]}
    if rope_type == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ModelError("config.json has llama3 RoPE scaling whose low_freq_factor is not below high_freq_factor")
    return theta, {"rope_type": rope_type, **scaling}


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"config.json needs {name} as a number above 0, not {value!r}")
    return float(value)


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json needs {name} as a whole number above 0, not {value!r}")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"config.json has {value!r} where a token id or a list of them belongs")
    return tuple(token_id for token_id in ids if token_id >= 0)


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"config.json has dtype {name}; supported are {', '.join(DTYPES)}")
    return name
