"""The Flax module of a transformer: to read, initialise, differentiate, train, shard, load and save."""

import dataclasses
from pathlib import Path
from typing import Self

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int

from jdllm.arrays import Tensor
from jdllm.checkpoints.loading import load_params, resolve, resolve_dtype
from jdllm.checkpoints.saving import save_hf
from jdllm.checkpoints.tokenizer import complete_ids, load_tokenizer
from jdllm.errors import CheckpointError
from jdllm.execution import dense
from jdllm.execution.dense import Sees
from jdllm.execution.module_layers import Hidden, Layers, param
from jdllm.layers import rms_norm
from jdllm.models import leaf
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_checkpoint
from jdllm.models.sharding import Rules, shardings
from jdllm.models.weights import Params, init_params, layer_runs, layer_stacks, spec_tree

Tokens = Int[Tensor, "batch length"]


class Transformer(nnx.Module):
    """A language model as an NNX module, for diffusion and for causal models.

    Its parts are `embed`, `layers` (in a model that has layers with and without experts also
    `dense_layers`), `final_norm`, and `head` where the head is not the embedding. Parameters have the names,
    shapes and axis names of `jdllm.models.weights.spec_tree`.

    Arguments:
    - `config`: the model.
    - `params`: the weights; drawn at random with `rngs.params` where they are not given.
    - `rngs`: of random weights.
    - `dtype`: of random weights.
    - `remat`: for a gradient keep one hidden state for each layer, and compute the rest of the layer once
      more. An attribute of the same name can be set at any time.
    """

    embed: nnx.Param
    layers: Layers
    dense_layers: Layers
    final_norm: nnx.Param
    head: nnx.Param

    def __init__(
        self,
        config: ModelConfig,
        params: Params | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        dtype: jnp.dtype | str = "float32",
        remat: bool = False,
    ):
        if params is None:
            params = init_params(config, (rngs or nnx.Rngs(0)).params(), dtype)
        self.config = config
        self.remat = remat
        self._source: str | None = None
        stacks = layer_stacks(config)
        for name, spec in spec_tree(config).items():
            if isinstance(spec, dict):
                axes = {key: of_leaf.axes for key, of_leaf in spec.items()}
                setattr(self, name, Layers(config, params[name], axes, name=name, numbers=stacks[name]))
            else:
                setattr(self, name, param(params[name], spec.axes))

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        dtype: str = "auto",
        mesh: Mesh | None = None,
        rules: Rules | None = None,
        remat: bool = False,
        progress: bool = False,
    ) -> Self:
        """Load a checkpoint.

        Arguments:
        - `model`: a directory in the layout of Hugging Face, a native one (`jdllm convert`), a GGUF file, or
          a hub id.
        - `dtype`: of the weights: "bfloat16", "float16", "float32", or "auto" for the type of the checkpoint.
        - `mesh`: the devices; by default the weights go to the default device.
        - `rules`: how the weights are cut, from axis names of the spec tree to axes of `mesh`
          (`jdllm.models.sharding.shardings`). Each device receives its own share only.
        - `remat`: recompute each layer's activations in the backward pass.
        - `progress`: show a progress bar where standard error is a terminal.

        Raises `CheckpointError` and `ConfigError` for a checkpoint or rules that cannot be used.
        """
        path = resolve(model)
        config = config_from_checkpoint(path)
        sharding = None if mesh is None else shardings(config, mesh, rules or {})
        dtype = resolve_dtype(path, config, dtype)
        tokenizer = load_tokenizer(path)
        params = load_params(path, config, dtype, progress=progress, sharding=sharding)
        if tokenizer is not None:
            config = dataclasses.replace(complete_ids(config, tokenizer), token_limit=len(tokenizer))
        loaded = cls(config, params, remat=remat)
        loaded._source = str(path.absolute())
        return loaded

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        dtype: str | None = None,
        like: str | Path | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write a Hugging Face checkpoint: `model.safetensors` with the configuration and tokenizer files.

        The directory appears when it is complete. The host holds one tensor at a time.

        Arguments:
        - `directory`: the directory to create.
        - `dtype`: of the stored weights: "bfloat16", "float16" or "float32"; by default their own.
        - `like`: the checkpoint directory from which all other files are copied; by default the one that
          the model was loaded from.
        - `overwrite`: replace a checkpoint at `directory`.

        Raises `CheckpointError` where `directory` exists or cannot be written, where no `like` is known, and
        where the configuration of `like` belongs to another model.
        """
        like = like or self._source
        if like is None:
            raise CheckpointError(
                "save_pretrained copies config.json and the tokenizer from a checkpoint, and this model was"
                " not loaded from one: give like=DIRECTORY"
            )
        save_hf(Path(directory), self.config, self.params(), Path(like), dtype=dtype, overwrite=overwrite)

    def params(self) -> Params:
        """The weights as the plain pytree that executables take: the same arrays, not copies."""
        parts = {name: vars(self)[name] for name in spec_tree(self.config)}
        return {
            name: part.leaves() if isinstance(part, Layers) else part.get_value()
            for name, part in parts.items()
        }

    def sees(
        self,
        shape: tuple[int, int],
        padding_mask: Bool[Tensor, "batch length"] | None = None,
        positions: Int[Tensor, "batch length"] | None = None,
    ) -> Sees:
        """What the tokens of a batch see of each other, in the form that every layer of this model takes.

        Arguments:
        - `shape`: (sequences, tokens of each).
        - `padding_mask`: false for padding, on any side.
        - `positions`: for the rotary embedding; by default the place of each token in its sequence.
        """
        return dense.sees(self.config, shape, padding_mask, positions)

    def logits(self, h: Hidden) -> Float32[Array, "batch length vocab"]:
        """f32 logits of hidden states after the last layer."""
        normed = rms_norm(h, self.final_norm.get_value(), self.config.rms_norm_eps)
        head = self.embed if self.config.tied_head else self.head
        return leaf.logits(normed.reshape(-1, h.shape[-1]), head.get_value()).reshape(*h.shape[:-1], -1)

    def __call__(
        self,
        tokens: Tokens,
        *,
        padding_mask: Bool[Tensor, "batch length"] | None = None,
        positions: Int[Tensor, "batch length"] | None = None,
    ) -> Float32[Array, "batch length vocab"]:
        """f32 logits of every token, before any shift.

        Arguments:
        - `tokens`: ids.
        - `padding_mask`: false for padding, on any side. All other tokens have the logits of the sequence
          without padding; logits of padding mean nothing.
        - `positions`: for the rotary embedding; by default the place of each token in its sequence.
        """
        sees = self.sees((tokens.shape[0], tokens.shape[1]), padding_mask, positions)
        h = leaf.rows(self.embed.get_value(), tokens)
        for name, first, end in layer_runs(self.config):
            h = vars(self)[name].run(h, sees, first, end, remat=self.remat)
        return self.logits(h)
