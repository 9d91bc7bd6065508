"""Ranks over NCCL: collectives in captured graphs, and two GPUs against one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks import RankProcesses, tokens
from tokenspeed.forward import FORWARD_PACKAGES
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, KernelOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.execution.graphs.cuda import CudaGraphBackend, open_graph_memory
from tokenspeed.runtime.execution.graphs.cuda_nodes import NodeReader
from tokenspeed.runtime.protocol.sampling import SamplingParams

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

PROMPTS = [[(11 * i + 5 * j) % 900 + 1 for j in range(3 + 7 * i)] for i in range(6)]
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, top_k=50, seed=3, ignore_eos=True)


def test_collectives_of_a_graph_read_what_is_there_at_its_replay() -> None:
    """One rank is enough for NCCL to launch its kernels."""
    from tokenspeed.runtime.distributed.nccl import NcclCommunicator

    device = torch.device("cuda", torch.cuda.current_device())
    communicators = [NcclCommunicator(torch.distributed.HashStore(), 0, 1, device) for _ in range(2)]
    for communicator in communicators:
        communicator.open()
    backend = CudaGraphBackend(open_graph_memory(device), FORWARD_PACKAGES, NodeReader())
    source = torch.zeros(3, 5, device=device)
    outs = [torch.zeros(3, 5, device=device) for _ in communicators]
    graphs = []
    with backend.session():
        for communicator, out in zip(communicators, outs, strict=True):

            def step(communicator: NcclCommunicator = communicator, out: torch.Tensor = out) -> None:
                out.copy_(communicator.all_gather_last(communicator.all_reduce(source * 2)))

            graphs.append(backend.capture(step, kind="decode", label="collectives"))
    for value in (1.0, 2.0):
        source.fill_(value)
        for graph, out in zip(graphs, outs, strict=True):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, torch.full_like(out, 2 * value))
    # One communicator and its graphs go; the graphs of the other serve on.
    graphs.pop()
    communicators[1].close()
    source.fill_(3.0)
    graphs[0].replay()
    torch.cuda.synchronize()
    assert torch.equal(outs[0], torch.full_like(outs[0], 6.0))
    graphs.clear()
    communicators[0].close()


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    ranks = RankProcesses(2)
    ranks.start()
    yield ranks
    ranks.stop()


def config(model: Path, graphs: GraphOptions) -> Config:
    return Config(
        model=ModelOptions(model=str(model), device="cuda", dtype="float32"),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64),
        kernels=KernelOptions(tune_kernels=False),
        cache=CacheOptions(max_total_tokens=4096),
        graphs=graphs,
    )


@two_gpus
@pytest.mark.parametrize("graphs", ["graphs", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_two_gpus_say_what_one_says(
    processes: RankProcesses, tiny: Callable[..., Path], model_type: str, graphs: str
) -> None:
    model = tiny(model_type, "float32")
    options = GraphOptions(
        enforce_eager=graphs == "eager",
        cudagraph_capture_sizes=None if graphs == "eager" else (1, 4, 8),
        prefill_graph_max_tokens=0 if graphs == "eager" else 64,
    )
    settings = config(model, options)
    for sampling in (GREEDY, SAMPLED):
        alone, spread = (processes.generate(ranks, settings, PROMPTS, sampling) for ranks in (1, 2))
        assert tokens(spread) == tokens(alone)
