from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tokenspeed.server.engine_info import engine_info
from tokenspeed.runtime.config import Config, ModelOptions
from tokenspeed.runtime.protocol.state import Loads
from tokenspeed.server.info import Description


def description(**changes: Any) -> Description:
    config = Config(model=ModelOptions(model="m"))
    return Description(config, engine_info(**changes), "http://127.0.0.1:1")


def test_the_gateway_is_told_the_model_s_sampling_defaults() -> None:
    own = {"temperature": 0.6, "top_k": 20.0, "repetition_penalty": 1.05}
    told = description(default_sampling=own).model_info().default_sampling_params_json
    # The gateway drops all of it when top_k is not written as an integer.
    assert told == json.dumps({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05})
    assert description().model_info().default_sampling_params_json == ""


def test_the_longest_prompt_leaves_room_for_a_token_in_context_and_cache() -> None:
    assert description().model_info().max_req_input_len == 31
    assert description(num_blocks=4).model_info().max_req_input_len == 15


def test_retained_prefix_cache_is_use_but_not_load() -> None:
    loads = Loads(running=2, waiting=3, used_blocks=16, cached_blocks=32, total_blocks=64, paused=True)
    (rank,) = description().loads(loads).loads
    assert rank.token_usage == pytest.approx(0.75)
    assert rank.active_token_usage == pytest.approx(0.25)
    assert (rank.num_used_tokens, rank.max_total_num_tokens) == (192, 256)
    assert (rank.queues.waiting, rank.queues.paused) == (0, 3)


def test_a_model_without_special_ids_says_minus_one() -> None:
    model = description(pad_token_id=0).model_info()
    assert (model.bos_token_id, model.pad_token_id) == (-1, 0)
