"""Checkpoints with random weights: what their files say, and that a server opens them."""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.offloaded import ALL_SHAPES
from benchmarks.random_checkpoint import HF_CONFIGS
from benchmarks.served_checkpoint import write_served_checkpoint
from benchmarks.serving import served
from jdllm.models.hf_config import config_from_hf
from tests.benchmarks.shapes import small

STEPS = 16


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_its_configuration_is_read_as_the_shape(shape: str):
    config = ALL_SHAPES[shape]
    read = config_from_hf(HF_CONFIGS[config.family](config))
    # The end of a turn is in Dream's tokenizer alone.
    assert dataclasses.replace(read, eot_id=config.eot_id) == dataclasses.replace(config, dtype="bfloat16")


def dreams_counts(masks: int, steps: int) -> list[int]:
    """Tokens that each step commits by the loop of Dream's sampler: of those that are masked at time t the
    share 1 - s / t until time s, rounded down, and all in the last step."""
    times, counts = np.linspace(1, 1e-3, steps + 1), []
    for t, s in itertools.pairwise(times[:-1]):
        counts.append(int(masks * (1 - s / t)))
        masks -= counts[-1]
    return [*counts, masks]


@pytest.mark.parametrize(
    ("shape", "counts"), [("llada-8b", [2] * 16), ("dream-7b", dreams_counts(32, STEPS))]
)
def test_a_server_opens_it_and_commits_as_the_family_does(tmp_path: Path, shape: str, counts: list[int]):
    write_served_checkpoint(tmp_path / shape, small(shape))
    body = {"prompt": [3, 4, 5], "max_tokens": 32, "steps": STEPS, "ignore_eos": True, "logprobs": 0}
    with served(tmp_path / shape, 128, tmp_path / "executables") as server:
        answer = httpx.post(f"{server['url']}/v1/completions", json=body, timeout=60).json()
    choice = answer["choices"][0]
    committed = Counter(choice["logprobs"]["committed_in"])
    assert [committed[step] for step in range(STEPS)] == counts
    assert choice["nfe"] == STEPS
    assert choice["text"].startswith("w")
