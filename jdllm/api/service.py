"""The model behind HTTP: what may be asked of it, and the calls that wait or run."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fastapi

from jdllm.api import arrivals
from jdllm.api.errors import ApiError, bad_request, dead, stopping
from jdllm.api.fields import UNKNOWN_FIELD, Fields
from jdllm.api.metrics import Metrics
from jdllm.api.protocol import Asking, given_fields
from jdllm.api.running import Running, call_id, owner_of
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.llm import LLM
from jdllm.prompts import AskedPrompt, specs_of
from jdllm.serving.async_engine import AsyncEngine
from jdllm.serving.engine import Updates

_log = logging.getLogger("jdllm.api")

_LONGEST_NAME = 64
"""Characters that are told of a field that nobody knows."""

_LONGEST_TOKEN = 256
"""Characters that no token of any vocabulary has more of."""

_READERS = 4
"""Threads that read bodies."""

_LOGGED_NAMES = 1024
"""Fields that nobody knows, of which the log tells."""

_RETRY_AFTER = 1
"""Seconds after which a client may ask again where the queue is full."""

_FINAL = {"x-should-retry": "false"}
"""OpenAI's clients would send such a request again."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a server serves.

    - `names`: of the model, the first of which is its own.
    - `default_sampling`: what applies where a request says nothing.
    - `max_queue`: requests that may wait.
    - `max_n`: samples of a prompt.
    - `max_requests_per_key`: requests, one for each sample, that the owner of a key may have waiting or
      running, `None` for any number. Without keys all clients share this number.
    - `request_timeout`: seconds that a request may take, `None` for any.
    - `log_requests`, `log_prompts`: whether answered requests are logged, and whether what clients wrote is.
    - `allow_beyond_positions`: whether sequences may be longer than the positions that the model is made for.
    - `strict_fields`: whether a request with a field that nobody knows is refused.
    - `otlp_traces_endpoint`: URL that takes a span of each request, `None` for none.
    - `examples`: texts that the page offers to try, by its modes "complete", "chat" and "infill".
    """

    names: tuple[str, ...]
    default_sampling: SamplingParams
    max_queue: int = 1024
    max_n: int = 128
    max_requests_per_key: int | None = None
    request_timeout: float | None = None
    log_requests: bool = False
    log_prompts: bool = False
    allow_beyond_positions: bool = False
    strict_fields: bool = False
    otlp_traces_endpoint: str | None = None
    examples: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


class Service:
    """One model behind HTTP.

    Arguments:
    - `llm`: the model.
    - `engine`: drives its engine.
    - `settings`: how it serves.
    - `metrics`: what is told to monitoring.

    `reading` are the threads in which bodies are read.
    """

    def __init__(self, llm: LLM, engine: AsyncEngine, settings: Settings, metrics: Metrics):
        self.llm, self.engine, self.settings, self.metrics = llm, engine, settings, metrics
        self.created = int(time.time())
        self.started = time.monotonic()
        self.running: dict[str, Running] = {}
        self.reading = ThreadPoolExecutor(_READERS, thread_name_prefix="jdllm-read")
        self._logged: set[str] = set()
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="jdllm-score")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is served."""
        if self.settings.allow_beyond_positions:
            return self.room
        return min(self.room, self.positions)

    @property
    def positions(self) -> int:
        """Positions that the model is made for."""
        return self.llm.config.rope.effective_context(self.llm.config.max_positions)

    @property
    def room(self) -> int:
        """Tokens of the longest sequence that the device has room for."""
        return self.llm.engine.longest_served

    @property
    def tokenizer(self) -> Tokenizer:
        if self.llm.tokenizer is None:
            raise bad_request("the model has no tokenizer files: use token ids")
        return self.llm.tokenizer

    @property
    def mask_token(self) -> str | None:
        """The text of the mask."""
        mask_id = self.llm.config.mask_id
        return None if mask_id is None else self.tokenizer.token(mask_id)

    def model(self, name: str | None) -> str:
        """The name that a request is answered under; raises `ApiError` for a model that is not here."""
        if name is None:
            return self.settings.names[0]
        if name not in self.settings.names:
            listed = ", ".join(self.settings.names)
            raise ApiError(
                404, f"there is no model {name}, only {listed}", param="model", code="model_not_found"
            )
        return name

    def ignored(self, body: Fields) -> dict[str, Any]:
        """What an answer says of the fields of a request that nobody knows: nothing where there are none.

        Each name is logged once. Raises `ApiError` for the first of them where fields are strict.
        """
        names = [_shown(name) for name in body.ignored()]
        if names and self.settings.strict_fields:
            raise bad_request(f"there is no field {names[0]}", names[0].partition(".")[0], UNKNOWN_FIELD)
        for name in names:
            if name not in self._logged and len(self._logged) < _LOGGED_NAMES:
                self._logged.add(name)
                _log.warning("requests have a field %s, which this server does not know: it is ignored", name)
        return {"ignored_fields": names} if names else {}

    def sampling(self, body: Asking, **further: object) -> SamplingParams:
        """The parameters of a request: its own values, and otherwise the server's.

        Without a seed one is drawn. `max_tokens` without `steps` evaluates a step for each token. Raises
        `RequestError` for what cannot be, and `ApiError` for more steps than tokens.
        """
        given = dict(given_fields(body)) | further
        if ("max_tokens" in given or "gen_length" in given) and "steps" not in given:
            given["steps"] = None
        sampling = self.settings.default_sampling.changed(**{"seed": None, **given})
        if sampling.n > self.settings.max_n:
            raise bad_request(f"n is {sampling.n}, expected at most {self.settings.max_n}", "n")
        if sampling.steps is not None and sampling.steps > sampling.gen_length:
            raise bad_request(
                f"steps is {sampling.steps}, more than the {sampling.gen_length} tokens that are generated",
                "steps",
            )
        return sampling

    def sampling_of_masks(self, body: Asking, **further: object) -> SamplingParams:
        """As `sampling`, for masks that are filled in their places: the server's own steps and blocks are for
        what it generates by default."""
        return self.sampling(body, **further).changed(steps=body.steps, block_length=body.block_length)

    def check_length(self, tokens: int) -> None:
        """Raise `ApiError` for a sequence that is longer than what is served."""
        if tokens > self.longest:
            why = "that this server has room for"
            if self.longest == self.positions:
                why = "positions of the model; serve --allow-beyond-positions lets longer ones pass"
            raise bad_request(
                f"a sequence of {tokens} tokens, the prompt and what is generated, is longer than the"
                f" {self.longest} {why}",
                code="context_length_exceeded",
            )

    def check_text(self, characters: int) -> None:
        """Raise `ApiError` for a text of so many characters that is too long whatever its tokens are: to find
        these would take two hundred times its memory."""
        if characters > self.room * _LONGEST_TOKEN:
            raise bad_request(
                f"a text of {characters} characters is longer than the {self.room} tokens that this server"
                " has room for",
                code="context_length_exceeded",
            )

    def encode(
        self, text: str, *, parse_special: bool | None, parsed: Sequence[str] = (), begins: bool = True
    ) -> list[int]:
        """As `Tokenizer.encode`; raises `ApiError` as `check_text` does."""
        self.check_text(len(text))
        return self.tokenizer.encode(text, parse_special=bool(parse_special), parsed=parsed, begins=begins)

    def check_room(self, samples: int) -> None:
        """Raise `ApiError` where so many further samples may not wait, now or ever."""
        waiting = self.llm.engine.stats().waiting
        _check_bound(samples, waiting, self.settings.max_queue, "requests wait", "queue_full")

    def _check_share(self, owner: int | None, samples: int) -> None:
        """Raise `ApiError` where the owner of a key may not have so many further samples, now or ever."""
        most = self.settings.max_requests_per_key
        if most is None:
            return
        held = sum(len(running.requests) for running in self.running.values() if running.owner == owner)
        _check_bound(samples, held, most, "requests of this key wait or run", "too_many_requests")

    async def scored[T](self, score: Callable[[], T]) -> T:
        """`score()`, which evaluates the model outside of the engine's requests: one call at a time."""
        if self.engine.error is not None:
            raise dead(self.engine.error)
        future = asyncio.get_running_loop().run_in_executor(self._scoring, score)
        try:
            return await asyncio.wait_for(future, self.settings.request_timeout)
        except TimeoutError:
            raise self._timed_out() from None

    def submit(
        self, request: fastapi.Request, prefix: str, asked: Sequence[AskedPrompt], updates: Updates
    ) -> Running:
        """Hand a call to the engine.

        Arguments:
        - `request`: of HTTP; when its client goes, so does the call.
        - `prefix`: of the call's id.
        - `asked`: what each prompt asks for.
        - `updates`: "every" for updates as they happen, "later" for updates at the end of a block.

        Raises `ApiError` if the queue is full or the engine has stopped, and the errors of `Engine.add`.
        """
        if self.engine.error is not None:
            raise dead(self.engine.error)
        specs = specs_of(asked)
        self.check_room(len(specs))
        self._check_share(owner_of(request), len(specs))
        began = time.monotonic()
        submitted = self.engine.submit(specs, updates=updates)
        arrivals.submitted(request)
        request.state.counted = True
        running = Running(
            call_id(prefix),
            request,
            asked,
            submitted,
            engine=self.engine,
            metrics=self.metrics,
            tokenizer=self.llm.tokenizer,
            calls=self.running,
            began=began,
        )
        if self.settings.log_prompts:
            for one in asked:
                prompt = one.specs[0].prompt.tolist() if one.text is None else one.text
                _log.info("%s of request %s has the prompt %r", running.id, request.state.request_id, prompt)
        running.watch(self.settings.request_timeout, self._timed_out())
        return running

    def refused(self, request: fastapi.Request, error: ApiError) -> None:
        """Tell monitoring of a request that came to nothing before it was submitted."""
        if not getattr(request.state, "counted", False):
            self.metrics.request_ended(request.url.path, error.status, 0.0, None, 0, 0)

    def _timed_out(self) -> ApiError:
        message = f"the request took longer than {self.settings.request_timeout} s"
        return ApiError(408, message, code="request_timeout", headers=_FINAL)

    def calls_of(self, owner: int | None) -> dict[str, Running]:
        """The calls that the owner of a key may see: its own, and all where there is no key or it is the
        admin's."""
        return {id: call for id, call in self.running.items() if owner in (None, call.owner)}

    def cancel(self, call: str, owner: int | None) -> None:
        """End a call for who asks for it by its id; raises `ApiError` where `owner` may see none."""
        if call not in self.calls_of(owner):
            raise ApiError(404, f"there is no request {call} that runs or waits", code="request_not_found")
        self.running[call].end(
            ApiError(409, "the request was cancelled", code="request_cancelled", headers=_FINAL)
        )

    def stop(self) -> None:
        """End all calls; their clients are told that the server stops."""
        for running in list(self.running.values()):
            running.end(stopping())

    def close(self) -> None:
        """End what is left."""
        for pool in (self.reading, self._scoring):
            pool.shutdown(wait=False, cancel_futures=True)


def _check_bound(samples: int, held: int, most: int, what: str, code: str) -> None:
    """Raise `ApiError` where so many further samples may not join those that are held.

    Arguments:
    - `most`: that may be held.
    - `what`, `code`: what those that are held do, and what an error is called that says so.
    """
    if samples > most:
        raise bad_request(f"{samples} samples are asked for at once, expected at most {most}", "n")
    if held + samples > most:
        raise ApiError(
            429,
            f"{held} {what}, and at most {most} may: try again later",
            code=code,
            headers={"Retry-After": str(_RETRY_AFTER)},
        )


def _shown(name: str) -> str:
    """A name that a client chose, of bounded length and printable."""
    return name[:_LONGEST_NAME].encode("unicode_escape").decode()
