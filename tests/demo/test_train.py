import dataclasses
import functools
import itertools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jdllm.checkpoints.loading import load_params
from jdllm.decoding.generation_defaults import default_sampling
from jdllm.decoding.sampling import SamplingParams
from jdllm.demo import checkpoint_path
from jdllm.demo.data import DEMO_BUCKETS, Asked, Bucket, make_batches, prefetch
from jdllm.demo.export import hf_config, write_checkpoint
from jdllm.demo.long_data import LongBucket
from jdllm.demo.tasks import GEN_LENGTH, TASKS, Instance, split_of, stream
from jdllm.demo.tokenizer import BOS, EOS, EOT
from jdllm.demo.train import SETTINGS, TrainSettings, exact_match, learning_rate_at, train
from jdllm.errors import CheckpointError
from jdllm.llm import LLM
from jdllm.models.hf_config import config_from_hf
from jdllm.models.weights import init_params, is_spec, param_bytes, spec_tree

BUCKETS = (Bucket(48, 64, (("retrieval", 1.0),)),)
SMALL = TrainSettings(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    intermediate_size=128,
    buckets=BUCKETS,
    minutes=60,
    steps=320,
    learning_rate=1.5e-3,
    dtype="float32",
    reports=1,
    report_instances=2,
    final_instances=2,
    workers=1,
)


def test_batches_hold_training_instances_of_the_bucket():
    bucket = Bucket(64, 50, (("addition", 1.0), ("brackets", 1.0)), chat_share=0.0)
    tokens, prompt_length, total_length = make_batches((bucket,), steps=4, seed=0, index=0)
    assert tokens.shape == (4, 50 * 64)
    gen_lengths = (total_length - prompt_length).ravel()
    assert set(np.unique(gen_lengths)) == {8, 16, 24, GEN_LENGTH}
    for row, start, end in zip(
        tokens.reshape(200, 64), prompt_length.ravel(), total_length.ravel(), strict=True
    ):
        prompt, response = bytes(row[:start].tolist()).decode(), row[start:].tolist()
        answer = bytes(itertools.takewhile(lambda token: token != EOS, response)).decode()
        task = "brackets" if prompt.startswith("close") else "addition"
        assert split_of(Instance(task, prompt, answer)) == "train"
        assert set(response[len(answer) :]) == {EOS}
        assert start + len(answer) < end <= 64


def test_chat_examples_start_and_end_like_the_template():
    bucket = Bucket(128, 40, (("questions", 1.0),), chat_share=1.0)
    tokens, prompt_length, _ = make_batches((bucket,), steps=1, seed=0, index=0)
    for row, start in zip(tokens.reshape(40, 128), prompt_length[0], strict=True):
        assert row[0] == BOS
        response = row[start:].tolist()
        assert response[response.index(EOS) - 1] == EOT
        assert response.count(EOT) == 1


def test_demo_buckets_hold_every_task_and_the_longest_context():
    batches = make_batches(DEMO_BUCKETS, steps=1, seed=0, index=0)
    assert batches.tokens.shape == (1, sum(bucket.batch * bucket.length for bucket in DEMO_BUCKETS))
    assert batches.total_length.max() > 500
    assert list(TrainSettings().held_out(1)) == list(TASKS)


def test_batches_depend_on_seed_and_index_only():
    first, other = (make_batches(BUCKETS, 2, seed=0, index=i) for i in (0, 1))
    again = make_batches(BUCKETS, 2, seed=0, index=0)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.tokens, other.tokens)


@pytest.mark.slow
def test_workers_give_the_batches_in_order():
    source = prefetch(functools.partial(make_batches, BUCKETS, 2, 0), workers=2)
    for index in range(6):
        np.testing.assert_array_equal(next(source).tokens, make_batches(BUCKETS, 2, 0, index).tokens)
    source.close()


def test_learning_rate_warms_up_and_falls():
    rates = [float(learning_rate_at(jnp.float32(p), 1.0)) for p in (0.0, 0.015, 0.03, 0.515, 1.0)]
    np.testing.assert_allclose(rates, [0.0, 0.5, 1.0, 0.505, 0.01], atol=1e-6)


@pytest.mark.parametrize("block_length", [None, 8])
def test_checkpoint_has_the_official_tensors_and_loads(block_length: int | None, tmp_path: Path):
    values = TrainSettings(
        hidden_size=32, num_layers=3, num_heads=2, intermediate_size=40, block_length=block_length
    ).hf_config()
    config = config_from_hf(values)
    params = init_params(config, jax.random.key(0), "float32")
    write_checkpoint(tmp_path / "a" / "demo", values, params)
    assert config_from_hf(tmp_path / "a" / "demo") == config
    assert (config.mask_id, config.stop_ids, config.vocab_size) == (261, (257, 260), 264)
    assert (config.family, config.block_length) == ("llada" if block_length is None else "sdar", block_length)
    with safe_open(tmp_path / "a" / "demo" / "model.safetensors", framework="numpy") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        types = {file.get_slice(name).get_dtype() for name in stored}
    specs = jax.tree.leaves(spec_tree(config), is_leaf=is_spec)
    assert stored == {name: spec.source_shape for spec in specs for name, _ in spec.sources()}
    assert types == {"BF16"}
    loaded = load_params(tmp_path / "a" / "demo", config, "float32")
    rounded = jax.tree.map(lambda p: p.astype("bfloat16").astype("float32"), params)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), loaded, rounded)))
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    rule = {} if block_length is None else {"transfer": "dynamic", "threshold": 0.9}
    assert default_sampling(tmp_path / "a" / "demo") == SamplingParams(gen_length=GEN_LENGTH, **rule)
    with pytest.raises(CheckpointError, match="exists already"):
        write_checkpoint(tmp_path / "a" / "demo", values, params)


def test_failed_write_leaves_nothing(tmp_path: Path):
    values = hf_config(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=40)
    with pytest.raises(KeyError, match="final_norm"):
        write_checkpoint(tmp_path / "demo", values, {"embed": jnp.zeros((264, 32))})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", SETTINGS)
def test_demo_models_fit_into_eight_megabytes(model: str):
    assert param_bytes(config_from_hf(SETTINGS[model].hf_config()), "bfloat16") < 7.8e6


def test_existing_directory_is_refused_in_one_line(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "jdllm.demo.train", "--out", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {tmp_path} exists already: name a directory that does not"]


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_checkpoint(tmp_path: Path):
    """The first dispatch of a run has a learning rate of zero, and this one has no other."""
    once = dataclasses.replace(SMALL, minutes=1e-6, begin_with=tmp_path / "first")
    train(dataclasses.replace(once, seed=1, begin_with=None), tmp_path / "first", lambda line: None)
    train(once, tmp_path / "second", lambda line: None)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_a_block_model_begins_with_the_weights_of_the_demo_model():
    begun = SETTINGS["block"].first_weights()
    norms = {name: begun["layers"].pop(name) for name in ("q_norm", "k_norm")}
    assert {(x.shape, float(x.min()), float(x.max())) for x in norms.values()} == {((6, 32), 1.0, 1.0)}
    demo = load_params(checkpoint_path(), config_from_hf(checkpoint_path()), "float32")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), begun, demo))


def test_a_checkpoint_of_other_sizes_is_refused_as_a_beginning(tmp_path: Path):
    settings = dataclasses.replace(SMALL, begin_with=checkpoint_path())
    with pytest.raises(CheckpointError):
        train(settings, tmp_path / "demo", lambda line: None)
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
@pytest.mark.parametrize("block_length", [None, 8])
def test_training_learns_to_copy_the_value_of_a_single_pair(block_length: int | None, tmp_path: Path):
    lines: list[str] = []
    others = (1,) if block_length else ()
    settings = dataclasses.replace(SMALL, block_length=block_length, other_lengths=others)
    report = train(settings, tmp_path / "demo", lines.append)
    assert report.losses[0] > 5
    assert np.mean(report.losses[-5:]) < 0.02 * report.losses[0]
    assert any("retrieval" in line for line in lines)
    config = config_from_hf(tmp_path / "demo")
    params = load_params(tmp_path / "demo", config, "float32")
    source = stream("retrieval", "test", np.random.default_rng(5), room=TASKS["retrieval"].min_room)
    asked = [Asked.plainly(instance) for instance in itertools.islice(source, 200)]
    assert exact_match(params, config, asked) > 0.8
    assert config.block_length == block_length
    with LLM(tmp_path / "demo", dtype="float32", max_num_batched_tokens=256, progress=False) as llm:
        prompts, sampling = [prompt for prompt, _ in asked[:20]], llm.default_sampling()
        answers = [
            llm.generate(prompt_token_ids=prompts, sampling=one)
            for one in (sampling, *(sampling.changed(block_length=length) for length in others))
        ]
    for outputs in answers:
        right = [output.text == answer for output, (_, answer) in zip(outputs, asked, strict=False)]
        assert np.mean(right) > 0.7


@pytest.mark.slow
def test_wall_clock_budget_ends_the_run(tmp_path: Path):
    settings = dataclasses.replace(SMALL, minutes=1e-6, steps=10**9)
    report = train(settings, tmp_path / "demo", lambda line: None)
    assert report.steps <= settings.steps_per_dispatch


@pytest.mark.slow
def test_training_for_retrieval_learns_to_predict_queries_and_ends(tmp_path: Path):
    settings = dataclasses.replace(
        SMALL,
        buckets=(LongBucket(192, 24, scoring=True), LongBucket(192, 24, scoring=False)),
        max_positions=512,
        steps=80,
    )
    lines: list[str] = []
    report = train(settings, tmp_path / "retrieval", lines.append)
    assert report.losses[0] > 5
    assert report.losses[-1] < 0.5 * report.losses[0]
    assert any("pairs 256" in line and "sentences 1024" in line for line in lines)
    config = config_from_hf(tmp_path / "retrieval")
    assert config.max_positions == 512


def test_models_have_the_same_size_and_retrieval_its_own_examples():
    demo, retrieval = SETTINGS["demo"], SETTINGS["retrieval"]
    assert demo == TrainSettings(workers=demo.workers)
    begun = {"begin_with": checkpoint_path(), "learning_rate": 5e-4}
    assert SETTINGS["block"] == dataclasses.replace(demo, block_length=8, other_lengths=(1, 4), **begun)
    changed = {
        field.name
        for field in dataclasses.fields(demo)
        if getattr(demo, field.name) != getattr(retrieval, field.name)
    }
    schedule = {"learning_rate", "reports", "report_instances", "final_instances"}
    assert changed == {"begin_with", "buckets", "max_positions"} | schedule
