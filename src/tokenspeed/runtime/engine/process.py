"""The life of one rank process: start up, serve, end in order, and say why when it cannot."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from tokenspeed.errors import TokenSpeedError, cause_of
from tokenspeed.runtime.config import Config
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.errors import is_victim
from tokenspeed.runtime.engine.agreement import StepDigest
from tokenspeed.runtime.engine.control import ControlQueue
from tokenspeed.runtime.engine.grammars import Grammars
from tokenspeed.runtime.engine.loop import EngineLoop
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.engine.profiler import Profiler
from tokenspeed.runtime.engine.startup import Startup
from tokenspeed.runtime.engine.stream import FrontStream, PeerStream, Stream
from tokenspeed.runtime.execution.plans import Plans
from tokenspeed.runtime.loader.kept import KeptWeights
from tokenspeed.runtime.protocol.blackbox import BlackBox
from tokenspeed.runtime.protocol.calls import Reload
from tokenspeed.runtime.protocol.reports import Ready
from tokenspeed.runtime.protocol.state import FIRST_WEIGHT_VERSION, ReloadStatus
from tokenspeed.runtime.reload.committed import CommittedCode
from tokenspeed.runtime.reload.forward import ForwardReload
from tokenspeed_kernel.progress import PROGRESS
from tokenspeed_kernel.registry import REGISTRY
from tokenspeed_reload import Reloader

log = logging.getLogger(__name__)


def run(
    run_dir: Path,
    rank: int,
    reloader: Reloader | None,
    generation: int,
    tactics: Mapping[str, Any] | None = None,
    keeper: socket.socket | None = None,
) -> int:
    """Serve as `rank` until the front says stop.

    Args:
        run_dir: directory of this set of ranks.
        rank: of this process.
        reloader: what has recorded the code that runs; None where reloads are not permitted.
        generation: number of that code.
        tactics: of the ranks that this one replaces; None for a first one.
        keeper: leads to the front, which keeps the memory of the weights; None where that is not wanted.

    Returns:
        The exit code: 0 after a stop, else the error's own. The front has been told the error's sentence.
    """
    config = msgspec.json.decode((run_dir / "config.json").read_bytes(), type=Config)
    level = config.serve.log_level.upper()
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s", stream=sys.stderr)
    channel = Channel(rank, config.parallel.tensor_parallel_size, run_dir)
    outbox = Outbox(rank, run_dir)
    outbox.open()
    try:
        channel.open()
        kept = None if keeper is None else KeptWeights(keeper)
        startup = Startup(config, channel, outbox, generation, tactics, kept)
        startup.seconds["import"] = time.time() - psutil.Process().create_time()
        _serve(startup, reloader)
    except TokenSpeedError as error:
        outbox.failed(str(error), error.exit_code)
        return error.exit_code
    # Edited code may raise anything, SystemExit included.
    except BaseException as error:
        left = is_victim(error, rank)
        if not left:
            log.error("the rank cannot go on", exc_info=error)
        sentence = f"rank {rank} failed: {cause_of(error)}" + ("" if left else "; its traceback is above")
        outbox.failed(sentence, 1, is_victim=left)
        return 1
    finally:
        outbox.close()
        channel.close()
        zmq.Context.instance().destroy()  # once what was said last is on its way
    return 0


def _serve(startup: Startup, reloader: Reloader | None) -> None:
    stream: Stream
    digest = StepDigest()
    blackbox = BlackBox(startup.channel.rank, startup.channel.run_dir)
    blackbox.open()
    if startup.channel.rank == 0:
        stream = FrontStream(startup.channel, digest)
        stream.open()
    else:
        stream = PeerStream(startup.channel, digest)
    build(startup, stream, reloader, digest, blackbox).run()
    startup.close()


def build(
    startup: Startup,
    stream: Stream,
    reloader: Reloader | None,
    digest: StepDigest | None = None,
    blackbox: BlackBox | None = None,
) -> EngineLoop:
    """Start up one rank and tell the front that it is ready; the caller runs the loop.

    Raises:
        TokenSpeedError: with one sentence for the user.
    """
    startup.run()
    channel, outbox = startup.channel, startup.outbox
    blackbox = blackbox or BlackBox(channel.rank, channel.run_dir)  # which notes nothing
    reload = _forward_reload(startup, channel, outbox, reloader, blackbox) if reloader is not None else None
    control = ControlQueue(startup.scheduler, outbox, reload)
    profiler = Profiler(channel, outbox, startup.device.type)
    source = startup.source
    grammars = Grammars(source.tokenizer_dir, source.config.vocab_size, source.config.eos_token_ids)
    overlap = startup.device.type != "cpu"  # on a CPU nothing runs beside the host
    loop = EngineLoop(
        channel,
        stream,
        outbox,
        startup.scheduler,
        startup.executor,
        control,
        profiler,
        grammars,
        blackbox,
        digest if channel.size > 1 else None,
        overlap=overlap,
    )
    if reload is not None:
        reload.code.tell()
    outbox.send(Ready(info=startup.info()))
    return loop


def _forward_reload(
    startup: Startup, channel: Channel, outbox: Outbox, reloader: Reloader, blackbox: BlackBox
) -> ForwardReload:
    plans = Plans(startup.executor, startup.wishes)
    reloader.prepare()
    reloader.add_participant(REGISTRY)
    reloader.add_participant(plans)
    reloader.restless = [PROGRESS]

    def status(state: str, call: Reload, detail: str) -> None:
        generation = startup.executor.generation.number
        blackbox.reloads(call.id, state)
        outbox.send(ReloadStatus(state=state, generation=generation, id=call.id, by=call.by, detail=detail))

    code = CommittedCode(reloader, lambda: startup.executor.generation.number, outbox.send)
    return ForwardReload(
        reloader,
        code,
        plans,
        startup.executor,
        startup.scheduler,
        channel,
        startup.world,
        status,
        FIRST_WEIGHT_VERSION,
        startup.finiteness,
        startup.kept,
    )
