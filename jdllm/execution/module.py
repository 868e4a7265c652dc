"""The Flax module around the transformer: what users read, initialise and convert."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jdllm.execution.transformer import forward, logits
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params, init_params, layer_stacks


class Transformer(nnx.Module):
    """A diffusion transformer as an NNX module. Its variables mirror `jdllm.models.weights.spec_tree`.

    Arguments:
    - `config`: the model.
    - `params`: weights; drawn at random with `rngs.params` where they are not given.
    - `dtype`: of random weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        dtype: jnp.dtype | str = "float32",
    ):
        if params is None:
            params = init_params(config, (rngs or nnx.Rngs(0)).params(), dtype)
        self.config = config
        self.embed = nnx.Param(params["embed"])
        for stack in layer_stacks(config):
            setattr(self, stack, nnx.Dict({name: nnx.Param(leaf) for name, leaf in params[stack].items()}))
        self.final_norm = nnx.Param(params["final_norm"])
        if "head" in params:
            self.head = nnx.Param(params["head"])

    def params(self) -> Params:
        """The weights as the plain pytree that executables take."""
        return nnx.to_pure_dict(nnx.split(self)[1])

    def __call__(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length vocab"]:
        """f32 logits of every position of a batch without padding, before any shift."""
        batch, length = tokens.shape
        ranges = [key_ranges(self.config, i * length, length) for i in range(batch)]
        rows = Rows(np.tile(np.arange(length), batch), *map(np.concatenate, zip(*ranges, strict=True)))
        params = self.params()
        hidden = forward(params, self.config, tokens.reshape(-1), rows)
        return logits(params, self.config, hidden).reshape(batch, length, -1)
