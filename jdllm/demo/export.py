"""Write a demo checkpoint in the layout of the published LLaDA or SDAR ones."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jdllm.checkpoints.index import SINGLE_FILE
from jdllm.checkpoints.saving import write_weights
from jdllm.demo.tasks import GEN_LENGTH, MAX_LENGTH
from jdllm.demo.tokenizer import BOS, EOS, EOT, MASK, VOCAB_SIZE, write_tokenizer
from jdllm.errors import CheckpointError
from jdllm.models.hf_config import GENERATION_CONFIG, config_from_hf
from jdllm.models.weights import Params

BLOCK_SAMPLING = {"transfer": "dynamic", "threshold": 0.9}
"""What a block model does unless it is asked for something else."""

_EMBEDDING_ROWS = -(-VOCAB_SIZE // 8) * 8


def hf_config(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    max_positions: int = 2 * MAX_LENGTH,
) -> dict[str, Any]:
    """The `config.json` of a demo model that is a LLaDA, with the official keys.

    `eot_token_id` is an addition: the published configuration has no key for it. The embedding has a
    multiple of 8 rows, a few more than the tokenizer has ids.
    """
    return {
        "activation_type": "silu",
        "alibi": False,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "bos_token_id": BOS,
        "d_model": hidden_size,
        "embedding_dropout": 0.0,
        "embedding_size": _EMBEDDING_ROWS,
        "eos_token_id": EOS,
        "eot_token_id": EOT,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": MASK,
        "max_sequence_length": max_positions,
        "mlp_hidden_size": intermediate_size,
        "model_type": "llada",
        "n_heads": num_heads,
        "n_kv_heads": num_heads,
        "n_layers": num_layers,
        "pad_token_id": EOS,
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 10000.0,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": VOCAB_SIZE,
        "weight_tying": False,
    }


def block_hf_config(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    max_positions: int,
    block_length: int,
) -> dict[str, Any]:
    """The `config.json` of a demo model that is an SDAR, with the official keys.

    Both ids that end a text stand in `eos_token_id`, since the published configuration has no other key for
    them.
    """
    return {
        "architectures": ["SDARForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block_length,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, EOT],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "mask_token_id": MASK,
        "max_position_embeddings": max_positions,
        "max_window_layers": num_layers,
        "model_type": "sdar",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "pad_token_id": EOS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": _EMBEDDING_ROWS,
    }


def require_free(out: Path) -> None:
    """Raise `CheckpointError` where `out` exists: a checkpoint is never overwritten."""
    if out.exists():
        raise CheckpointError(f"{out} exists already: name a directory that does not")


def write_checkpoint(out: Path, hf_values: dict[str, Any], params: Params) -> None:
    """Write `model.safetensors`, its configurations and the tokenizer files; all of them or nothing.

    Arguments:
    - `out`: the directory to create.
    - `hf_values`: the contents of `config.json`.
    - `params`: the weights, of any float dtype; stored in bfloat16.

    Raises `CheckpointError` where `out` exists.
    """
    require_free(out)
    config = config_from_hf(hf_values)
    generation = {"gen_length": GEN_LENGTH} | (BLOCK_SAMPLING if config.block_length is not None else {})
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for name, values in (("config.json", hf_values), (GENERATION_CONFIG, generation)):
            (temporary / name).write_text(json.dumps(values, indent=2) + "\n")
        write_weights(temporary / SINGLE_FILE, config, params, "bfloat16")
        write_tokenizer(temporary)
        temporary.chmod(0o755)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary)
        raise
