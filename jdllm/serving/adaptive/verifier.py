"""The autoregressive model that verifies drafts: which one will do, and what it can serve."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jdllm.checkpoints.loading import load_params, resolve
from jdllm.checkpoints.tokenizer import Tokenizer, load_tokenizer
from jdllm.errors import ConfigError, RequestError
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf, read_config
from jdllm.models.weights import Params, abstract_params, zero_params
from jdllm.serving.spec import RequestSpec

if TYPE_CHECKING:
    from jdllm.execution.module import Transformer


class Verifier(NamedTuple):
    """A causal model whose ids stand for the same tokens as in the diffusion model."""

    params: Params
    config: ModelConfig


def load_verifier(
    source: "str | Path | Transformer",
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    dtype: str,
    *,
    shares_ids: bool = False,
    load_weights: bool = True,
    progress: bool = False,
) -> Verifier:
    """Load a verifier, or take one that is in memory.

    Arguments:
    - `source`: a Hugging Face checkpoint directory or hub id, or a `Transformer`, which keeps its dtype.
    - `config`, `tokenizer`: of the diffusion model.
    - `dtype`: of the weights of a checkpoint.
    - `shares_ids`: without a tokenizer, take vocabularies of different sizes to agree up to the end of the
      smaller one.
    - `load_weights`: read the weights of a checkpoint; `False` leaves them zero.
    - `progress`: show a progress bar while loading, where standard error is a terminal.

    Raises what `check_verifier` raises, before any weight is read, and `CheckpointError` for a checkpoint
    that cannot be read.
    """
    if not isinstance(source, str | Path):
        check_verifier(source.config, None, config, tokenizer, shares_ids=shares_ids)
        return Verifier(source.params(), source.config)
    path = resolve(source)
    verifier = config_from_hf(read_config(path))
    check_verifier(verifier, load_tokenizer(path), config, tokenizer, shares_ids=shares_ids)
    if not load_weights:
        return Verifier(zero_params(verifier, dtype), verifier)
    return Verifier(load_params(path, verifier, dtype, progress=progress), verifier)


def abstract_verifier(source: "str | Path | Transformer", dtype: str) -> Verifier:
    """A verifier whose weights have shapes only, or one that is in memory.

    Arguments:
    - `source`, `dtype`: a checkpoint, and the type of its weights; or a `Transformer`, which keeps its dtype.

    Raises `CheckpointError` for a checkpoint without a configuration, and `ConfigError` for one that cannot
    be followed.
    """
    if not isinstance(source, str | Path):
        return Verifier(source.params(), source.config)
    config = config_from_hf(read_config(resolve(source)))
    return Verifier(abstract_params(config, dtype), config)


def check_verifier(
    verifier: ModelConfig,
    verifier_tokenizer: Tokenizer | None,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    shares_ids: bool,
) -> None:
    """Refuse a model that cannot verify, with a `ConfigError`.

    Arguments:
    - `verifier`, `config`: the autoregressive model and the diffusion model.
    - `verifier_tokenizer`, `tokenizer`: theirs, where they are known. Then every id that both define must be
      the same token; either vocabulary may have more rows, and either tokenizer more tokens.
    - `shares_ids`: where a tokenizer is not known, take vocabularies of different sizes to agree up to the
      end of the smaller one; vocabularies of one size are taken to agree anyway.
    """
    if config.in_order:
        raise ConfigError("a verifier is for models that denoise: leave it out for a causal model")
    if verifier.attention != "causal":
        raise ConfigError(
            f"the verifier is a {verifier.family} model, whose attention is not causal: expected an"
            " autoregressive model, such as Qwen2"
        )
    if tokenizer is not None and verifier_tokenizer is not None:
        _check_tokenizers(verifier_tokenizer, tokenizer)
    elif verifier.vocab_size != config.vocab_size and not shares_ids:
        raise ConfigError(
            f"the verifier has {verifier.vocab_size} ids and the model {config.vocab_size}, and not both"
            " tokenizers are known: set verifier_shares_ids if common ids mean the same in both"
        )


def _check_tokenizers(verifier: Tokenizer, tokenizer: Tokenizer) -> None:
    theirs, ours = ({i: token for token, i in t.vocabulary.items()} for t in (verifier, tokenizer))
    for i in sorted(theirs.keys() & ours.keys()):
        if theirs[i] != ours[i]:
            raise ConfigError(
                f"the verifier has another tokenizer: id {i} is {theirs[i]!r}, and {ours[i]!r} to the model"
            )


def check_verifiable(request: RequestSpec, verifier: Verifier | None) -> None:
    """Raise `RequestError` for an adaptive request without a verifier, or whose ids the verifier lacks."""
    if not request.adaptive:
        return
    if verifier is None:
        raise RequestError(
            "transfer 'adaptive' needs an autoregressive verifier: load LLM(..., verifier=...), or start"
            " jdllm serve with --verifier"
        )
    size = verifier.config.vocab_size
    unknown = [int(i) for i in request.prompt if i >= size and i != request.mask_id]
    if unknown:
        raise RequestError(f"token id {unknown[0]} is unknown to the verifier (0 to {size - 1})")
