"""Causal models in transformers on a card: first tokens of prompts, and tokens behind them.

Torch and transformers are imported where they are used.
"""

# pyright: reportMissingImports=false

import gc
import importlib.metadata
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import case_parser
from benchmarks.record import print_row, record
from benchmarks.shapes import CAUSAL_SHAPES
from jdllm.models.config import ModelConfig

DECODED = 128
CHUNK = 8192
"""Tokens of a prompt that are read at a time, where keys go to host memory."""


def random_model(config: ModelConfig, device: str) -> Any:
    """The model of a shape in bfloat16, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    named = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=config.tied_head,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(named).eval()
        finally:
            torch.set_default_dtype(before)


def seconds_of(model: Any, batch: int, length: int, tokens: int, **options: Any) -> float:
    """Seconds of a greedy generation of so many tokens behind each prompt, synchronised."""
    import torch

    ids = torch.randint(2, model.config.vocab_size // 2, (batch, length), device=model.device)
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    _synchronise(model)
    start = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **options)
    _synchronise(model)
    assert found.shape[1] == length + tokens
    return time.perf_counter() - start


def prefill(model: Any, length: int, repeats: int, how: str) -> dict[str, Any]:
    """The median time to the first token, with keys on the device ("plain") or in host memory."""
    options: dict[str, Any] = {}
    if how == "offloaded":
        options = {"cache_implementation": "offloaded", "prefill_chunk_size": CHUNK}
    times = [seconds_of(model, 1, length, 1, **options) for _ in range(repeats + 1)]
    row = {"what": "prefill", "how": how, "batch": 1, "prompt": length}
    return row | {"seconds": statistics.median(times[1:])}


def decode(model: Any, batch: int, length: int, repeats: int) -> dict[str, Any]:
    """The median time of a token of each request, with a static cache and compiled decodes."""
    options = {"cache_implementation": "static"}
    steps = []
    for _ in range(repeats + 1):
        one, many = (seconds_of(model, batch, length, n, **options) for n in (1, 1 + DECODED))
        steps.append((many - one) / DECODED)
    seconds = statistics.median(steps[1:])
    row = {"what": "decode", "how": "static, compiled", "batch": batch, "prompt": length}
    return row | {"seconds": seconds, "tokens_s": batch / seconds}


def _synchronise(model: Any) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> None:
    """What transformers takes for what `causal` and `causal_long` measure.

    `python3 -m benchmarks transformers_causal [--plain N] [--offloaded N] [--decode 1x4096 32x1024]`
    on a card. Offloaded caches read prompts in chunks of 8192. A first run is not counted.
    """
    parser = case_parser("transformers_causal", main.__doc__)
    parser.add_argument("--shape", choices=CAUSAL_SHAPES, default="llama-3.1-8b")
    parser.add_argument("--plain", type=int, nargs="*", default=[131072])
    parser.add_argument("--offloaded", type=int, nargs="*", default=[131072])
    parser.add_argument("--decode", nargs="*", default=["1x4096", "32x1024"], help="requests x tokens")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    model, table = random_model(CAUSAL_SHAPES[args.shape], args.device), []

    def keep(row: dict[str, Any]) -> None:
        table.append({"shape": args.shape, **row})
        print_row(table[-1])
        gc.collect()

    for batch, length in (map(int, one.split("x")) for one in args.decode):
        keep(decode(model, batch, length, args.repeats))
    for how in ("plain", "offloaded"):
        for length in getattr(args, how):
            keep(prefill(model, length, args.repeats, how))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    record(f"causal_transformers_{args.shape}", table, args.out, **versions)
