"""Every family against the recorded outputs of its published code: logits, layers, routing, greedy runs."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.checkpoints.loading import load_params
from jdllm.execution.module import Transformer
from jdllm.execution.transformer import embed, final_norm, forward, logits, packed_ranges
from jdllm.layers import head_logits, rms_norm
from jdllm.models.block import Rows
from jdllm.models.config import ModelConfig
from jdllm.models.hf_config import config_from_hf
from jdllm.models.layer import Layer
from jdllm.models.moe import route
from jdllm.models.rotary import inverse_frequencies
from jdllm.models.visibility import key_ranges
from jdllm.models.weights import Params, abstract_params
from tests.helpers import Golden, slow
from tests.models.layer_by_layer import layers_in_order

CAUSAL = ["llama", "llama31_rope", "mistral", "mistral_swa", "qwen2"]
BLOCKS = ["fast_dllm_v2", "llada2", "nemotron_labs_diffusion", "sdar"]
FAMILIES = ["dream", "llada_moe", *BLOCKS, *CAUSAL]
close = functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-4)


class Recorded(NamedTuple):
    """One family: what was recorded, and what is computed of it in one packed call.

    - `places`: case -> the packed rows of each of its sequences.
    - `computed`: "logits" and the hidden states by their recorded names, of all packed rows.
    """

    config: ModelConfig
    tensors: dict[str, np.ndarray]
    places: dict[str, list[slice]]
    computed: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def recorded(family) -> Recorded:
    golden = Golden(family)
    tensors = golden.tensors()
    config = config_from_hf(golden.directory)
    sequences = {case: unpadded(tensors, case) for case in cases(tensors)}
    places, start = {}, 0
    for case, rows in sequences.items():
        ends = start + np.cumsum([0, *map(len, rows)])
        places[case] = [slice(a, b) for a, b in itertools.pairwise(ends)]
        start = int(ends[-1])
    tokens = np.concatenate([ids for rows in sequences.values() for ids in rows])
    packed = [(case, p) for case, slices in places.items() for p in slices]
    ranges = [key_ranges(as_run(config, tensors, case), p.start, p.stop - p.start) for case, p in packed]
    positions = np.concatenate([np.arange(p.stop - p.start) for _, p in packed])
    rows = Rows(positions, *map(np.concatenate, zip(*ranges, strict=True)))
    params = load_params(golden.directory, config, "float32")
    run = jax.jit(functools.partial(evaluate, config=config))
    return Recorded(config, tensors, places, jax.tree.map(np.asarray, run(params, tokens, rows)))


def cases(tensors: dict[str, np.ndarray]) -> list[str]:
    """Names of whole sequences: what runs before others are stored has a test of its own."""
    named = {name.split(".")[0] for name in tensors if name.endswith((".input_ids", ".output"))}
    return sorted(named - {"cache"})


def as_run(config: ModelConfig, tensors: dict[str, np.ndarray], case: str) -> ModelConfig:
    """The model with the attention of a case: some have blocks of another length, some none."""
    if case.startswith("fwd_full"):
        return dataclasses.replace(config, attention="full", causal_context=False)
    lengths = [tensors[name] for name in (f"{case}.block_length", f"{case}.block_size") if name in tensors]
    return dataclasses.replace(config, block_length=int(lengths[0][0])) if lengths else config


def unpadded(tensors: dict[str, np.ndarray], case: str) -> list[np.ndarray]:
    """The sequences of a case; of a greedy run those with its tokens."""
    ids = tensors.get(f"{case}.output", tensors.get(f"{case}.input_ids"))
    assert ids is not None
    padding = np.zeros(len(ids), int)
    if f"{case}.attention_mask" in tensors:
        padding = (tensors[f"{case}.attention_mask"] == 0).sum(axis=1)
    return [row[pad:] for row, pad in zip(ids, padding, strict=True)]


def evaluate(params: Params, tokens, rows: Rows, *, config: ModelConfig) -> dict[str, jax.Array]:
    """Logits by `forward`, and every hidden state by walking the layers."""
    out = {"logits": logits(params, config, forward(params, config, tokens, rows))}
    sees = packed_ranges(config, rows)
    h = out["embed"] = embed(params, tokens)
    for i, weights in enumerate(layers_in_order(params, config)):
        layer = Layer(weights, config)
        attended = layer.project_back(sees.attend(layer, h)[0])
        h = h + attended
        if config.moe is not None and "router" in weights:
            x = rms_norm(h, weights["ffn_norm"], config.rms_norm_eps)
            out[f"layer{i}.router_logits"] = head_logits(x, weights["router"])
            shares, chosen = route(x, weights["router"], weights.get("expert_bias"), config.moe)
            out |= {f"layer{i}.topk_weights": shares, f"layer{i}.topk_ids": chosen}
        fed = layer.feed_forward(h)
        h = h + fed
        out |= {f"layer{i}.attn": attended, f"layer{i}.mlp": fed, f"layer{i}": h}
    out["final_norm"] = final_norm(params, config, h)
    return out


def test_logits_of_every_forward(recorded):
    compared = 0
    for case, places in recorded.places.items():
        expected = recorded.tensors.get(f"{case}.logits", recorded.tensors.get(f"{case}.logits_last8"))
        if expected is None:
            continue
        for row, place in enumerate(places):
            theirs = expected[row, -(place.stop - place.start) :]
            close(recorded.computed["logits"][place][-len(theirs) :], theirs, err_msg=case)
            compared += len(theirs)
    assert compared > 100


def test_hidden_states_of_every_layer(recorded):
    found = [name for name in recorded.tensors if ".hidden." in name]
    assert len(found) >= 8
    for name in found:
        case, state = name.split(".hidden.")
        (place,) = recorded.places[case]
        ours, theirs = recorded.computed[state][place], recorded.tensors[name]
        theirs = theirs.reshape(-1, theirs.shape[-1])
        if state.endswith("topk_ids"):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        else:
            close(ours, theirs, err_msg=name)


@pytest.mark.parametrize("family", CAUSAL, scope="module")
def test_greedy_continuations(recorded):
    """Logits of a whole recorded run choose each of its tokens, so that the run would be repeated."""
    tested = 0
    for case, places in recorded.places.items():
        if f"{case}.output" not in recorded.tensors:
            continue
        masks = recorded.tensors[f"{case}.attention_mask"]
        for place, ids, mask in zip(places, unpadded(recorded.tensors, case), masks, strict=True):
            chosen = recorded.computed["logits"][place].argmax(axis=-1)[mask.sum() - 1 : -1]
            np.testing.assert_array_equal(chosen, ids[mask.sum() :])
            assert len(chosen) == 32
            tested += 1
    assert tested == 7


@pytest.mark.parametrize("family", ["fast_dllm_v2", "sdar"], scope="module")
def test_a_block_sees_stored_blocks_and_itself(family):
    """Two clean blocks, then a third one with masks, and the same without masks."""
    golden = Golden(family)
    tensors, config = golden.tensors(), config_from_hf(golden.directory)
    config = dataclasses.replace(config, block_length=8)
    params = load_params(golden.directory, config, "float32")
    run = jax.jit(functools.partial(evaluate, config=config))
    rows = Rows(np.arange(24), *key_ranges(config, 0, 24))
    drafted = run(params, tensors["cache.input_ids"][0], rows)["logits"]
    close(drafted[:16], tensors["cache.prefill_logits"][0])
    close(drafted[16:], tensors["cache.block_logits"][0])
    if "cache.store_logits" in tensors:
        stored = run(params, tensors["cache.store_input_ids"][0], rows)["logits"]
        close(stored[16:], tensors["cache.store_logits"][0])


def test_a_block_being_filled_sees_itself_and_a_causal_context():
    """Of Nemotron-Labs-Diffusion: a prefix, and a block behind it both before and after it is finished."""
    golden = Golden("nemotron_labs_diffusion")
    tensors, config = golden.tensors(), config_from_hf(golden.directory)
    params = load_params(golden.directory, config, "float32")
    run = jax.jit(functools.partial(evaluate, config=config))
    prefix, block = (tensors[f"cache.{name}_ids"][0] for name in ("prefix", "block"))
    start, end = key_ranges(config, 0, 21)
    clean = np.concatenate([prefix, tensors["cache.store_ids"][0]])
    finished = run(params, clean, Rows(np.arange(21), start, end))
    close(finished["logits"][:13], tensors["cache.prefill_logits"][0])
    close(finished["logits"][13:], tensors["cache.store_logits"][0])
    end = np.where(np.arange(21) < 13, end, 21)
    drafted = run(params, np.concatenate([prefix, block]), Rows(np.arange(21), start, end))
    close(drafted["logits"][13:], tensors["cache.block_logits"][0])


def test_frequencies_of_nemotron_are_the_recorded_ones():
    golden = Golden("nemotron_labs_diffusion")
    tensors, config = golden.tensors(), config_from_hf(golden.directory)
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(frequencies, tensors["rope.inv_freq"], rtol=1e-6)
    assert config.rope.attention_factor == tensors["rope.attention_scaling"][0]


SEEN = [
    slow("mistral_swa", "fwd_batch"),
    ("sdar", "fwd_block_ragged"),
    slow("fast_dllm_v2", "fwd_ragged"),
    ("llada2", "fwd_block_batch"),
    slow("nemotron_labs_diffusion", "fwd_causal_batch"),
]


@pytest.mark.parametrize(("name", "case"), SEEN)
def test_the_module_sees_what_the_family_sees(name, case):
    golden = Golden(name)
    tensors = golden.tensors()
    config = as_run(config_from_hf(golden.directory), tensors, case)
    model = Transformer(config, load_params(golden.directory, config, "float32"))
    close(model(jnp.asarray(tensors[f"{case}.input_ids"])), tensors[f"{case}.logits"])


@pytest.mark.parametrize("family", ["dream", "llada_moe"], scope="module")
def test_sixteen_bit_rows_stay_sixteen_bit(family):
    config = config_from_hf(Golden(family).directory)
    params = abstract_params(config, "bfloat16")
    ints = np.zeros(9, np.int32)
    hidden = jax.eval_shape(lambda p, t, r: forward(p, config, t, r), params, ints, Rows(ints, ints, ints))
    assert (hidden.shape, hidden.dtype) == ((9, 64), jnp.bfloat16)


def test_experts_are_stacked_in_the_order_of_the_product():
    golden = Golden("llada_moe")
    config = config_from_hf(golden.directory)
    layers = load_params(golden.directory, config, "float32")["layers"]
    for name, stored in golden.tensors("model").items():
        if ".experts." in name:
            parts = name.split(".")
            leaf = layers[f"experts_{parts[6].removesuffix('_proj')}"]
            np.testing.assert_array_equal(leaf[int(parts[2]), int(parts[5])], stored.T)


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_ids_are_those_of_the_checkpoint(family):
    golden = Golden(family)
    ids = golden.json("goldens")
    config = config_from_hf(golden.directory)
    stated = None if family in ("fast_dllm_v2", "llada2") else ids.get("mask_id")
    assert (config.mask_id, config.eos_id) == (stated, ids["eos_id"])
    assert config_from_hf(golden.json("config") | {"mask_token_id": 5}).mask_id == 5
