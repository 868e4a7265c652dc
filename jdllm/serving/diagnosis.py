"""Where values that are infinite or not numbers begin."""

from collections.abc import Iterable

import numpy as np

from jdllm.compiling.executables import Executables
from jdllm.decoding.non_finite import origin
from jdllm.errors import NonFiniteError
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.adaptive.verifier import Verifier
from jdllm.serving.request import Request


class Diagnosis:
    """Runs the sequence of a request once more, layer by layer.

    Arguments:
    - `params`: the weights; `None` if not all are on the device: then nothing is run again.
    - `config`: the model.
    - `executables`: keep the compiled functions.
    - `verifier`: of adaptive requests.
    """

    def __init__(
        self,
        params: Params | None,
        config: ModelConfig,
        executables: Executables,
        verifier: Verifier | None = None,
    ):
        self._params = params
        self._config = config
        self._executables = executables
        self._verifier = verifier

    def __call__(self, request: Request) -> NonFiniteError:
        """What to raise for a request whose values are infinite or not numbers."""
        if self._params is None:
            return NonFiniteError("a step gave values that are infinite or not numbers")
        models = [("", self._params, self._config)]
        if request.adaptive and self._verifier is not None:
            models.append(("the verifier's ", self._verifier.params, self._verifier.config))
        for whose, params, config in models:
            place = self._origin(params, config, request.sequences())
            if place is not None:
                return NonFiniteError(f"{whose}{place}")
        return NonFiniteError(
            "a step gave infinite values or none, and its sequence alone does not:"
            " they come from another request of the batch, or from keys and values of a cache"
        )

    def _origin(self, params: Params, config: ModelConfig, evaluated: Iterable[np.ndarray]) -> str | None:
        known = (np.minimum(tokens, config.vocab_size - 1) for tokens in evaluated)
        places = (origin(params, config, tokens, self._executables) for tokens in known)
        return next(filter(None, places), None)
