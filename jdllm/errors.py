"""The one exception type that a user's mistake raises, and its kinds."""

import contextlib
from collections.abc import Iterator


class JdllmError(Exception):
    """A user's mistake: the message says what was wrong, where, and what would be right."""


class ConfigError(JdllmError):
    """A model configuration that jdllm cannot run, or a malformed one."""


class DoesNotFitError(ConfigError):
    """A model, a step or a pool that needs more memory than there is."""


class CheckpointError(JdllmError):
    """A checkpoint directory, file or tensor that is missing, damaged or of another shape."""


class RequestError(JdllmError):
    """A prompt or a sampling parameter that cannot be served."""


class NoRoomError(RequestError, DoesNotFitError):
    """A request that needs more memory than there is."""


class NonFiniteError(JdllmError):
    """Values of the model that are infinite or not numbers: nothing is sampled from them."""


class KvPoolError(JdllmError):
    """Keys and values that do not fit the pool, or pages asked of a request that does not hold them."""


@contextlib.contextmanager
def naming(what: str, index: int, count: int) -> Iterator[None]:
    """Put the name and the index of one of `count` things before the message of a `RequestError`, where there
    are several."""
    try:
        yield
    except RequestError as e:
        raise RequestError(f"{what} {index}: {e}" if count > 1 else str(e)) from None
