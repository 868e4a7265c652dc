"""What a model generates on so many cards; `test_several_cards.py` runs this where there are eight.

`python3 -m tests.several_cards FAMILY CASES CARDS...` prints a line of JSON for each number of cards: tokens
of the cases, "all" or names with commas between them, evaluations, logits, and how many executables were
compiled, and how many the directory `JDLLM_TEST_KEPT` had, if it is set. FAMILY may name a verifier behind a
plus sign, and a type of stored keys behind a colon. "long" and "all long" are cases whose steps cards with
whole layers deal out.
"""

import json
import os
import sys
from typing import Any

import jax

from jdllm import LLM
from jdllm.demo import checkpoint_path
from jdllm.outputs import RequestOutput
from jdllm.prompts import LongPrompt
from tests.helpers import Golden

PROMPTS = [list(range(1, n)) for n in (9, 40, 21)]
LONG_PROMPTS = [[i % 199 + 1 for i in range(n)] for n in (600, 531)]
CONTEXT = LongPrompt(instruction=list(range(4)), context=list(range(5, 105)), query=list(range(200, 209)))
CONTROLS: dict[str, Any] = {
    "allowed_token_ids": range(9, 200),
    "logit_bias": dict.fromkeys(range(100, 150), 2.0),
    "min_tokens": 5,
}
DENOISED: dict[str, dict[str, Any]] = {
    "uncached": {},
    "guided": {"cfg_scale": 1.5},
    "drawn": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
    "threshold": {"transfer": "threshold", "threshold": 0.1, "steps": None},
    "dual": {"cache": "dual"},
    "prefix": {"cache": "prefix"},
    "sparse": {"cache": "sparse", "retention": 0.5},
    "head_sparse": {"cache": "head_sparse", "retention": 0.5, "refresh_delay": 1},
    "controlled": CONTROLS | {"cache": "dual"},
}
LONG = {
    "long": ("uncached", "head_sparse"),
    "all long": ("uncached", "guided", "threshold", "dual", "sparse", "head_sparse"),
}
"""Cases of `DENOISED`, behind long prompts."""

VERIFIED: dict[str, dict[str, Any]] = {
    "adaptive": {"transfer": "adaptive", "max_lookahead": 6, "steps": None},
    "adaptive dual": {"transfer": "adaptive", "max_lookahead": 6, "steps": None, "cache": "dual"},
    "adaptive and drawn": {"transfer": "adaptive", "temperature": 1.0, "mixture_weight": 0.7, "steps": None},
}
"""With a verifier only."""

PREPARED: dict[str, dict[str, Any]] = {
    "prepared": {},
    "prepared per head": {"retention": "per_head"},
    "prepared by the largest": {"retention_heads": "max"},
}
IN_ORDER: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 3},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "controlled": CONTROLS,
}
IN_BLOCKS: dict[str, dict[str, Any]] = {
    "schedule": {},
    "dynamic": {"transfer": "dynamic", "threshold": 0.3},
    "filtered": {"temperature": 0.8, "seed": 3, "top_k": 20},
    "controlled": CONTROLS,
    "drafted": {"generation_mode": "self_speculation"},
    "chosen": {"generation_mode": "auto"},
    "verified": {"transfer": "lossy_speculation", "verify_policy": "span", "verify_span": 2, "seed": 3},
}


def outputs_of(llm: LLM, wanted: str) -> dict[str, list[RequestOutput]]:
    """The outputs of each case: of three requests in company, or of a question over a long context."""
    if llm.config.in_order:
        sampling, cases = llm.default_sampling().changed(max_tokens=12, early_stop=False), IN_ORDER
    elif llm.config.in_parts:
        sampling, cases = llm.default_sampling().changed(max_tokens=12, early_stop=False), IN_BLOCKS
    else:
        given = {"gen_length": 16, "block_length": 8, "steps": 16, "early_stop": False}
        sampling, cases = llm.default_sampling().changed(**given), DENOISED | VERIFIED
    chosen = {
        name: case
        for name, case in cases.items()
        if name in wanted.split(",") or (wanted == "all" and name not in VERIFIED)
    }
    if wanted in LONG:
        sampling = sampling.changed(steps=8)
        chosen = {name: DENOISED[name] for name in LONG[wanted]}
    prompts = LONG_PROMPTS if wanted in LONG else PROMPTS
    found = {
        name: llm.generate(prompt_token_ids=prompts, sampling=sampling.changed(**case))
        for name, case in chosen.items()
    }
    if wanted == "all" and not llm.config.in_parts:
        chunks = {"chunk_length": 32, "chunks_kept": 2, "tokens_kept": 8, "bos_id": 506}
        found |= {
            name: llm.generate(CONTEXT, sampling=sampling.changed(prefilling=chunks | case))
            for name, case in PREPARED.items()
        }
    return found


def main(family: str, wanted: str, counts: list[int]) -> None:
    if jax.default_backend() == "cpu":  # where most of the time is compiling
        jax.config.update("jax_disable_most_optimizations", True)
    family, _, kv_cache_dtype = family.partition(":")
    family, _, verifier = family.partition("+")
    path = checkpoint_path() if family == "demo" else Golden(family).directory
    options: dict[str, Any] = {"verifier": Golden(verifier).directory} if verifier else {}
    for cards in counts:
        with LLM(
            path,
            dtype="float32",
            devices=cards,
            cache_dir=os.environ.get("JDLLM_TEST_KEPT"),
            progress=False,
            max_num_batched_tokens=1024 if wanted in LONG else 256,
            kv_pool="16MiB",
            whole_layers=wanted in LONG and cards > 1,
            kv_cache_dtype=kv_cache_dtype or "auto",
            **options,
        ) as llm:
            prompt = (LONG_PROMPTS if wanted in LONG else PROMPTS)[1]
            found, logits = outputs_of(llm, wanted), llm.logits([prompt])[0, -1, :8].tolist()
            told: dict[str, Any] = {"cards": cards, "logits": logits, "weights": llm.account.weights}
            told["tokens"] = {name: [list(one.token_ids) for one in case] for name, case in found.items()}
            told["evaluations"] = {name: [one.nfe for one in case] for name, case in found.items()}
            matrices = 1 if llm.config.tied_head else 2
            told |= {"compiled": llm.executables.compiled, "loaded": llm.executables.loaded}
            told |= {"ids": llm.config.vocab_size, "id_bytes": 4 * matrices * llm.config.hidden_size}
            print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(count) for count in sys.argv[3:]])
