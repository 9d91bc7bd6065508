"""Flags and configuration are two spellings of the same thing."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.cli.flags import add_flags, config_from
from tokenspeed.cli.parser import Parser
from tokenspeed.errors import ConfigError
from tokenspeed.runtime.config import Config, GraphOptions, option_fields, validate

TEXT = st.text("abc/._", min_size=1, max_size=8)


def parse(*arguments: str) -> Config:
    parser = Parser(prog="ts serve", description="")
    add_flags(parser)
    return config_from(parser.parse(arguments))


def spelling(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, tuple):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", str(value)]


@st.composite
def settings_of_one_server(draw: st.DrawFn) -> dict[str, Any]:
    """A value for some of the options, by the type of the option's default or annotation."""
    values: dict[str, Any] = {"model": draw(TEXT)}
    for _, option in option_fields():
        if option.name == "model" or draw(st.booleans()):
            continue
        kind = str(option.type)
        if choices := option.metadata["choices"]:
            values[option.name] = draw(st.sampled_from(choices))
        elif option.name == "kernel":
            solutions = st.sampled_from(["norm.rms_norm=reference", "gemm.linear=torch"])
            values[option.name] = tuple(draw(st.lists(solutions, min_size=1, max_size=2)))
        elif kind.startswith("tuple"):
            values[option.name] = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
        elif kind.startswith("bool"):
            values[option.name] = draw(st.booleans())
        elif option.name == "tensor_parallel_size":
            values[option.name] = draw(st.integers(1, 64))
        elif kind.startswith("int"):
            values[option.name] = draw(st.integers(16, 65535))
        elif option.name == "gpu_memory_utilization":
            values[option.name] = draw(st.floats(0, 1, exclude_min=True))
        elif kind.startswith("float"):
            values[option.name] = draw(st.floats(0, 1e6, exclude_min=True))
        else:
            values[option.name] = draw(TEXT)
    return values


def configured(values: dict[str, Any]) -> Config:
    config = Config()
    for group, option in option_fields():
        if option.name in values:
            changed = replace(getattr(config, group), **{option.name: values[option.name]})
            config = replace(config, **{group: changed})
    return config


def test_every_option_has_a_name_of_its_own() -> None:
    names = [option.name for _, option in option_fields()]
    assert len(names) == len(set(names))


@given(values=settings_of_one_server(), order=st.randoms(use_true_random=False))
def test_flags_give_the_configuration_that_they_spell(values: dict[str, Any], order: Any) -> None:
    values |= {"enforce_eager": False, "allow_reload_forward": True}
    flags = [spelling(name, value) for name, value in values.items()]
    order.shuffle(flags)
    assert parse(*(word for flag in flags for word in flag)) == configured(values)


def test_absent_flags_are_the_defaults() -> None:
    assert parse("m") == configured({"model": "m"})


def test_the_model_may_stand_anywhere() -> None:
    assert parse("m", "--port", "1") == parse("--port", "1", "m") == parse("--port", "1", "--model", "m")


def test_aliases() -> None:
    expected = configured({"model": "m", "tensor_parallel_size": 2})
    assert parse("m", "--tp", "2") == parse("m", "-tp", "2") == parse("m", "--tensor-parallel-size=2") == expected


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--model-path m --tp-size 2", "--model m --tensor-parallel-size 2"),
        ("m --context-length 64 --max-running-requests 3", "m --max-model-len 64 --max-num-seqs 3"),
        ("m --page-size 32 --random-seed 7", "m --block-size 32 --seed 7"),
        ("m --cuda-graph-bs 1 2", "m --cudagraph-capture-sizes 1 2"),
        ("m --disable-cuda-graph --disable-radix-cache", "m --enforce-eager --no-enable-prefix-caching"),
    ],
)
def test_names_of_other_engines_mean_the_same(theirs: str, ours: str) -> None:
    assert parse(*theirs.split()) == parse(*ours.split())


def test_no_abbreviations() -> None:
    with pytest.raises(ConfigError, match="no flag --tensor"):
        parse("m", "--tensor", "2")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        parse("m", "--enforce-eager", "--cpu-graphs")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cudagraph-capture-sizes", "0", "4"), "--cudagraph-capture-sizes must be 1 or more"),
        (
            ("--cudagraph-capture-sizes", "1", "9", "--max-num-seqs", "8"),
            "has 9, above --max-num-seqs 8; raise the latter",
        ),
        (("--cudagraph-capture-sizes",), "--cudagraph-capture-sizes"),
        (("--prefill-graph-max-tokens", "15"), "--prefill-graph-max-tokens must be 16 or more"),
        (("--prefill-graph-max-tokens", "-1"), "--prefill-graph-max-tokens must be 16 or more"),
    ],
)
def test_steps_that_cannot_be_captured_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("m", *flags)


def test_no_sizes_at_all_are_refused_where_a_program_gives_them() -> None:
    with pytest.raises(ConfigError, match="needs at least one size; use --enforce-eager to capture none"):
        validate(Config(graphs=GraphOptions(cudagraph_capture_sizes=())))


def test_sizes_may_come_in_any_order_and_again() -> None:
    sizes = parse("m", "--cudagraph-capture-sizes", "8", "1", "8").graphs.cudagraph_capture_sizes
    assert sizes == (8, 1, 8)
    assert parse("m", "--prefill-graph-max-tokens", "0").graphs.prefill_graph_max_tokens == 0


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-model-len", "1", "--max-model-len must be 2 or more"),
        ("--max-total-tokens", "1", "--max-total-tokens must be 2 or more"),
        ("--tensor-parallel-size", "65", "--tensor-parallel-size must be 64 or less"),
        ("--max-num-seqs", "0", "--max-num-seqs must be 1 or more"),
        ("--max-num-seqs", "65537", "--max-num-seqs must be 65536 or less"),
        ("--max-num-batched-tokens", str(2**20 + 1), "--max-num-batched-tokens must be 1048576 or less"),
        ("--block-size", str(10**30), "--block-size must be 2147483647 or less"),
        ("--drain-timeout", "-1", "--drain-timeout must be between 0"),
        ("--drain-timeout", "nan", "--drain-timeout must be between 0"),
        ("--drain-timeout", "inf", "--drain-timeout must be between 0"),
        ("--seed", str(2**64), "--seed must fit into 64 bits"),
        ("--seed", str(-(2**63) - 1), "--seed must fit into 64 bits"),
        ("--api-key", "", "--api-key is empty"),
        ("--served-model-name", os.fsdecode(b"n\xe9"), "the value of --served-model-name is no UTF-8"),
        ("--port", "65536", "--port must be between 0 and 65535"),
    ],
)
def test_a_value_out_of_range_is_one_sentence(flag: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("m", f"{flag}={value}")
