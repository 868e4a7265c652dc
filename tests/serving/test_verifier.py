"""Which models may verify, and how one is loaded beside a diffusion model."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jdllm.checkpoints.loading import load_params
from jdllm.checkpoints.tokenizer import load_tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import CheckpointError, ConfigError
from jdllm.execution.module import Transformer
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.serving.adaptive.verifier import load_verifier
from tests.conftest import DREAM_BUDGET, KV_POOL
from tests.helpers import Golden

pytestmark = pytest.mark.usefixtures("shared_executables")

DREAM, QWEN2, LLADA = (Golden(family).directory for family in ("dream", "qwen2", "llada"))
SAMPLING = SamplingParams(gen_length=8, transfer="adaptive", max_lookahead=4, mixture_weight=0.8)

Checkpoint = Callable[[Path, dict[str, int] | None], Path]


def words(count: int, **others: int) -> dict[str, int]:
    """A vocabulary in which id 5 is the word `w5`, and others."""
    return {f"w{i}": i for i in range(count)} | others


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Copies a tiny checkpoint, with a tokenizer of the given words where there are any."""

    def make(source: Path, vocabulary: dict[str, int] | None) -> Path:
        directory = tmp_path / f"{source.name}{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(source / name, directory)
        if vocabulary is not None:
            tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            tokenizer.save(str(directory / "tokenizer.json"))
            (directory / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
            )
        return directory

    return make


def transformer(path: Path, **changes: int) -> Transformer:
    """The checkpoint in f32; its first rows where the vocabulary is made smaller."""
    config = config_from_hf(path)
    params = load_params(path, config, "float32")
    config = dataclasses.replace(config, **changes)
    cut = {name: params[name][: config.vocab_size] for name in ("embed", "head") if name in params}
    return Transformer(config, {**params, **cut})


@pytest.mark.slow
def test_from_directories_as_from_memory(checkpoint: Checkpoint):
    """Both tokenizers define a token that the other has not, as Dream's and Qwen2.5's."""
    model = checkpoint(DREAM, words(505, mask=509))
    llm = LLM(model, dtype="float32", verifier=checkpoint(QWEN2, words(507)))
    loaded = llm.generate("w5 w6", sampling=SAMPLING)[0]
    other = LLM(transformer(DREAM, token_limit=506), verifier=transformer(QWEN2))
    given = other.generate(prompt_token_ids=[[5, 6]], sampling=SAMPLING)[0]
    assert (loaded.token_ids, loaded.nfe) == (given.token_ids, given.nfe)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_checkpoint_is_loaded_in_the_type_of_the_model(dtype: str):
    verifier = load_verifier(QWEN2, config_from_hf(DREAM), None, dtype)
    assert {str(leaf.dtype) for leaf in (verifier.params["embed"], verifier.params["final_norm"])} == {dtype}
    llm = LLM(DREAM, dtype=dtype, verifier=QWEN2)
    assert len(llm.generate(prompt_token_ids=[[5, 6]], sampling=SAMPLING)[0].token_ids) <= 8


def test_another_tokenizer_is_refused(checkpoint: Checkpoint):
    vocabulary = words(505) | {"w7": 8, "w8": 7}
    with pytest.raises(ConfigError, match="another tokenizer: id 7 is 'w8', and 'w7' to the model"):
        LLM(
            checkpoint(DREAM, words(505)),
            verifier=checkpoint(QWEN2, vocabulary),
            verifier_shares_ids=True,
        )


def test_a_model_that_is_not_causal_is_refused():
    for verifier in (LLADA, transformer(LLADA)):
        with pytest.raises(ConfigError, match="verifier is a llada model, whose attention is not causal"):
            LLM(transformer(DREAM), verifier=verifier)


def test_a_causal_model_has_no_use_for_a_verifier():
    with pytest.raises(ConfigError, match="a verifier is for models that denoise: leave it out"):
        LLM(QWEN2, verifier=QWEN2)


def test_weights_that_nobody_asked_for_are_zero():
    """Executables for them serve the real ones."""
    read, empty = (
        load_verifier(QWEN2, config_from_hf(DREAM), None, "float32", load_weights=loaded).params
        for loaded in (True, False)
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), read) == jax.tree.map(
        lambda x: (x.shape, x.dtype), empty
    )
    assert any(leaf.any() for leaf in jax.tree.leaves(read))
    assert not any(leaf.any() for leaf in jax.tree.leaves(empty))


def test_sizes_that_differ_need_both_tokenizers_or_the_users_word(checkpoint: Checkpoint):
    config = config_from_hf(DREAM)
    tokenizer = load_tokenizer(checkpoint(DREAM, words(505)))
    smaller = transformer(QWEN2, vocab_size=490)
    for known in (None, tokenizer):
        with pytest.raises(ConfigError, match=r"490 ids and the model 512, .* set verifier_shares_ids"):
            load_verifier(smaller, config, known, "float32")
        assert load_verifier(smaller, config, known, "float32", shares_ids=True).config.vocab_size == 490
    padded = dataclasses.replace(config, vocab_size=640)
    checked = load_verifier(checkpoint(QWEN2, words(503)), padded, tokenizer, "float32")
    assert checked.config.vocab_size == 512


def test_a_verifier_that_is_not_there():
    with pytest.raises(CheckpointError, match="no directory"):
        LLM(transformer(DREAM), verifier=Path("/nowhere"))


def test_the_verifier_is_no_part_of_other_requests(dream_llm: LLM):
    sampling = SamplingParams(gen_length=8)
    sizes = {"max_num_batched_tokens": DREAM_BUDGET, "kv_pool": KV_POOL}
    verified = LLM(transformer(DREAM), verifier=transformer(QWEN2), **sizes)
    alone, beside = (
        llm.generate(prompt_token_ids=[[5, 6]], sampling=sampling)[0] for llm in (dream_llm, verified)
    )
    assert alone.token_ids == beside.token_ids
