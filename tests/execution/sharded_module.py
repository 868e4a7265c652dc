"""A module on two devices against one device; `test_module.py` runs this where there are two."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdllm import LLM, ConfigError, Transformer
from jdllm.models.sharding import shardings
from tests.helpers import Golden

RULES = {"heads": "model", "kv_heads": "model", "ffn": "model", "vocab": "model"}
CUT = {"q", "k", "v", "o", "gate", "up", "down", "embed", "head", "q_bias", "k_bias", "v_bias"}
CUT |= {"experts_gate", "experts_up", "experts_down"}


def loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.logsumexp(model(tokens), axis=-1) ** 2)


def main() -> None:
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compiling
    mesh = jax.make_mesh((2,), ("model",))
    for family in ("llada_moe", "qwen2"):
        directory, recorded = Golden(family).directory, Golden(family).tensors()
        tokens = jnp.asarray(recorded["fwd_batch.input_ids"])
        model = Transformer.from_pretrained(directory, dtype="float32", mesh=mesh, rules=RULES)
        for path, leaf in nnx.to_flat_state(nnx.state(model)):
            shares = [shard.data.size for shard in leaf.get_value().addressable_shards]
            assert shares == [leaf.size // (2 if path[-1] in CUT else 1)] * 2, path
        actual = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
        np.testing.assert_allclose(actual, recorded["fwd_batch.logits"], atol=2e-4, rtol=1e-4)

        alone = Transformer.from_pretrained(directory, dtype="float32")
        ours, theirs = (nnx.jit(nnx.grad(loss))(m, tokens) for m in (model, alone))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3), ours, theirs)
        q = ours["layers"]["attention"]["q"].get_value()
        assert {shard.data.shape for shard in q.addressable_shards} == {
            (q.shape[0], q.shape[1] // 2, q.shape[2])
        }
        with pytest.raises(ConfigError, match="the weights lie on 2 devices, and LLM runs on one"):
            LLM(model)
        with pytest.raises(
            ConfigError, match=r"'vocab' of .* is 511, which 2 devices along 'model' do not divide"
        ):
            shardings(dataclasses.replace(model.config, vocab_size=511), mesh, RULES)
    print("as on one device")


if __name__ == "__main__":
    main()
