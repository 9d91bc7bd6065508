"""`LLM`: a model in the caller's own program, without a server."""

from __future__ import annotations

import itertools
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tokenspeed.errors import ConfigError, RequestError, TokenSpeedError
from tokenspeed.hook import install_reloader, let_threads_sleep
from tokenspeed.offline.outputs import Delta, Generation, TokenLogprob
from tokenspeed.offline.params import SamplingParams
from tokenspeed.offline.prompts import Params, Prompt, Prompts, as_list, one_each, token_ids

if TYPE_CHECKING:
    from tokenspeed.offline.answers import Batch
    from tokenspeed.offline.engine import Engine
    from tokenspeed.offline.tokenizer import Tokenizer
    from tokenspeed.runtime.config import Config
    from tokenspeed.runtime.protocol.reports import CallReply, RequestOutput
    from tokenspeed.runtime.protocol.state import EngineInfo
    from tokenspeed_reload import Reloader

# The engine is imported by methods only: the reloader's hook has to be in place before.

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that is loaded now and answers until `close`.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or the name smollm2.
        config: the settings of `ts serve` that have to do with the model, with underscores: `dtype`,
            `max_model_len`, `max_num_seqs`, `tensor_parallel_size`, `allow_reload_forward` and so on.

    One rank runs in this process, on the caller's thread; more are processes of their own, which end with the
    thread that made the `LLM`. An `LLM` is for one thread at a time. It is a context manager.

    Raises:
        TokenSpeedError: with one sentence that says what to do.
    """

    info: EngineInfo
    """What is served: types, sizes, limits, seconds of each start-up phase."""

    def __init__(self, model: str, **config: Any) -> None:
        self._model = model
        self._settings = config
        self._engine: Engine | None = None
        self._ids = itertools.count()
        self._batches: dict[str, Batch] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self._tokenizer: Tokenizer | None = None
        self.open()

    def open(self) -> None:
        """Load the model, unless it is there; also after `close`."""
        if self._engine is not None:
            return
        let_threads_sleep()
        reloader = _permitted_reloader(self._settings)

        from tokenspeed.offline.grammars import OfflineGrammars
        from tokenspeed.offline.requests import OfflineIntake
        from tokenspeed.offline.settings import config_from

        config = config_from(self._model, self._settings)
        self._run_dir = tempfile.TemporaryDirectory(prefix="tokenspeed-")
        self._engine = _engine(config, Path(self._run_dir.name), reloader)
        try:
            self.info = self._engine.start()
        except BaseException:
            self.close()
            raise
        self._intake = OfflineIntake(self.info, config.model.seed)
        self._grammars = OfflineGrammars(self.info, self._engine.send)

    def close(self) -> None:
        """Free the model; what is not finished is dropped."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for batch in self._batches.values():
            batch.dropped = True
            batch.open.clear()
        self._batches.clear()
        try:
            engine.close()
        finally:
            self._run_dir.cleanup()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- answers ----

    def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[Generation]:
        """Answer one or several prompts, each a text or token ids.

        Args:
            prompts: one prompt, or a list of them.
            sampling_params: for all of them, or one for each.

        Returns:
            One generation a prompt, in their order.

        Raises:
            RequestError: for a request that cannot be served; none of them is begun then.
            TokenSpeedError: when an answer failed. `as_completed` gives the others all the same.
        """
        batch = self._submit(prompts, sampling_params)
        for _ in self._deltas(batch):
            pass
        for generation in batch.generations:
            for output in generation.outputs:
                if output.finish_reason == "error":
                    raise TokenSpeedError(f"the answer to prompt {generation.index} failed: {output.error}")
        return batch.generations

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> list[Generation]:
        """Answer one or several conversations, each a list of messages with `role` and `content`.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: for all of them, or one for each.
            chat_template: Jinja source to use instead of the model's own.
            add_generation_prompt: begin the assistant's turn.
            tools: JSON descriptions that the template may show.
            template_variables: what else the template looks for.

        Returns:
            One generation a conversation, in their order. Raises as `generate` does.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self.tokenizer
        texts = [
            tokenizer.chat_prompt(
                conversation,  # type: ignore[arg-type]
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **template_variables,
            )
            for conversation in conversations
        ]
        # A template brings its own special tokens.
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        generations = self.generate(ids, sampling_params) if ids else []
        for generation, text in zip(generations, texts, strict=True):
            generation.prompt = text
        return generations

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[Delta]:
        """What each step adds to each answer, as it comes; leaving the iteration aborts the rest.

        Takes and raises what `generate` does, but an answer that failed ends with the reason "error".
        """
        return self._deltas(self._submit(prompts, sampling_params))

    def as_completed(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[Generation]:
        """The generations in the order in which they end; leaving the iteration aborts the rest.

        Takes and raises what `generate` does, but an answer that failed has the reason "error".
        """
        return self._completed(self._submit(prompts, sampling_params))

    def logprobs(self, prompts: Prompts, top: int = 0) -> list[list[TokenLogprob | None]]:
        """How likely each token of each prompt is after those before it.

        Args:
            prompts: one prompt, or a list of them.
            top: also tell so many likeliest tokens at each position.

        Returns:
            One list a prompt with one entry a token; None for the first, before which there is nothing.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top)
        generations = self.generate(prompts, params)
        return [generation.prompt_logprobs or [] for generation in generations]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: when it has none.
        """
        from tokenspeed.offline.tokenizer import Tokenizer

        self._opened()
        if self._tokenizer is None:
            tokenizer = Tokenizer(Path(self.info.tokenizer_path))
            tokenizer.open()
            self._tokenizer = tokenizer
        return self._tokenizer

    # ---- control ----

    def reload_forward(
        self,
        *,
        mode: str = "wait",
        modules: Sequence[str] | None = None,
        timeout_s: float = 600.0,
        id: str | None = None,
    ) -> dict[str, Any]:
        """Run the edited forward pass from now on, as the control call of a server does (development only).

        The `LLM` must have been made with `allow_reload_forward=True`. Answers that are streaming finish first,
        or end with mode abort.

        Returns:
            The reply of the control call. `success` tells whether the edit runs; if not, all is as before.
        """
        from tokenspeed.offline.reload import reload_request

        call = {"id": id or str(uuid.uuid4()), "mode": mode, "modules": modules, "timeout_s": timeout_s}
        self._opened()
        request = reload_request(next(self._ids), call)
        if isinstance(request, dict):
            return request
        self._opened().send(request)
        while request.call not in self._replies:
            self._pump()
        return self._replies.pop(request.call)

    # ---- the way to the engine and back ----

    def _submit(self, prompts: Prompts, sampling_params: Params) -> Batch:
        """Check every request, then submit them all."""
        from tokenspeed.offline.answers import Answer, Batch, empty_generation
        from tokenspeed.offline.text import GrowingText
        from tokenspeed.runtime.protocol.calls import Submit

        engine = self._opened()
        asked = as_list(prompts)
        params = one_each(sampling_params, len(asked))
        ids = [self._ids_of(prompt) for prompt in asked]
        samplings = [self._intake.accept(prompt, wanted) for prompt, wanted in zip(ids, params, strict=True)]
        for answers in samplings:
            self._grammars.compile(answers[0])
        batch = Batch([])
        tokenizer = self._tokenizer_or_none(any(wanted.stops for wanted in params))
        for index, (prompt, wanted) in enumerate(zip(asked, params, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            generation = empty_generation(index, text, ids[index], wanted.n, logprobs=wanted.logprobs is not None)
            batch.generations.append(generation)
            first = None
            for completion, sampling in zip(generation.outputs, samplings[index], strict=True):
                growing = None
                if tokenizer is not None:
                    growing = GrowingText(
                        tokenizer,
                        ids[index],
                        wanted.stops,
                        skip_special_tokens=wanted.skip_special_tokens,
                        not_before=wanted.min_tokens,
                    )
                request_id = str(next(self._ids))
                batch.open[request_id] = Answer(batch, generation, completion, growing)
                self._batches[request_id] = batch
                known = self._grammars.defined(sampling)
                engine.send(Submit(request_id=request_id, prompt=ids[index], sampling=known, shares_prompt_with=first))
                first = first or request_id
        return batch

    def _deltas(self, batch: Batch) -> Iterator[Delta]:
        try:
            while batch.open or batch.deltas:
                while batch.deltas:
                    yield batch.deltas.popleft()
                if batch.open:
                    self._pump()
            if batch.dropped:
                raise TokenSpeedError("the LLM was closed before this answer was finished; ask again")
        finally:
            self._abandon(batch)

    def _completed(self, batch: Batch) -> Iterator[Generation]:
        waiting = [len(generation.outputs) for generation in batch.generations]
        for delta in self._deltas(batch):
            if delta.finish_reason is not None:
                waiting[delta.index] -= 1
                if not waiting[delta.index]:
                    yield batch.generations[delta.index]

    def _abandon(self, batch: Batch) -> None:
        """Nobody reads on: end what is open in the engine."""
        from tokenspeed.runtime.protocol.calls import Abort

        for request_id in batch.open:
            if self._batches.pop(request_id, None) is not None and self._engine is not None:
                self._engine.send(Abort(request_id=request_id))
        batch.open.clear()

    def _pump(self) -> None:
        """Take the engine's next messages to whom they are for."""
        from tokenspeed.runtime.protocol.reports import CallReply, Outputs

        engine = self._opened()
        try:
            messages = engine.receive()
        except TokenSpeedError:
            self.close()  # the engine is lost
            raise
        for message in messages:
            match message:
                case Outputs():
                    for output in message.outputs:
                        self._take(output)
                case CallReply():
                    self._reply(message)

    def _reply(self, message: CallReply) -> None:
        self._replies[message.call] = message.body

    def _take(self, output: RequestOutput) -> None:
        from tokenspeed.runtime.protocol.calls import Abort

        batch = self._batches.get(output.request_id)
        if batch is not None and batch.open[output.request_id].take(output):
            del batch.open[output.request_id], self._batches[output.request_id]
            if output.finish_reason is None:  # a stop string, of which the engine knows nothing
                self._opened().send(Abort(request_id=output.request_id))

    def _ids_of(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return token_ids(prompt)

    def _tokenizer_or_none(self, needed: bool) -> Tokenizer | None:
        """The tokenizer; None where the model has none and nothing needs it."""
        try:
            return self.tokenizer
        except RequestError:
            if needed:
                raise
            return None

    def _opened(self) -> Engine:
        if self._engine is None:
            raise TokenSpeedError("this LLM is closed; call open() or make another one")
        return self._engine


def _engine(config: Config, run_dir: Path, reloader: Reloader | None) -> Engine:
    from tokenspeed.offline.engine import LocalEngine
    from tokenspeed.offline.spawned import SpawnedEngine

    if config.parallel.tensor_parallel_size > 1:
        return SpawnedEngine(config, run_dir)
    return LocalEngine(config, run_dir, reloader)


_RELOADER_CACHE: dict[str | None, Reloader] = {}
"""The reloader of this process by its overlay: modules are recorded once, so there is at most one."""


def _permitted_reloader(settings: Mapping[str, Any]) -> Reloader | None:
    """The reloader of this process, where the model runs in it and may be edited."""
    if settings.get("allow_reload_forward") is not True or settings.get("tensor_parallel_size", 1) != 1:
        return None
    overlay = settings.get("reload_overlay")
    if not isinstance(overlay, str | None):
        return None  # the check of the settings will say so
    if _RELOADER_CACHE and overlay not in _RELOADER_CACHE:
        raise ConfigError("reload_overlay must be the same for every LLM of a process; start another process")
    if not _RELOADER_CACHE:
        _RELOADER_CACHE[overlay] = install_reloader(overlay)
    return _RELOADER_CACHE[overlay]
