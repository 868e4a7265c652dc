"""`jdllm eval --compare`: two models on the same tasks, one after the other."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdllm.cli.compiling import told_of_compiling
from jdllm.cli.engine import ModelOptions, asked_sampling, checked_config, load_model
from jdllm.cli.report import print_result
from jdllm.decoding.sampling import SamplingParams
from jdllm.engine_options import QUANTIZATIONS
from jdllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jdllm.demo.compare import Tokens


def other_model(source: ModelOptions, named: str) -> ModelOptions:
    """The second model of a comparison.

    Arguments:
    - `source`: the first model. All its options but one hold for the second model, too.
    - `named`: a form of `QUANTIZATIONS` for the weights of the same checkpoint, or another checkpoint.
    """
    if named in QUANTIZATIONS:
        return dataclasses.replace(source, given={**source.given, "quantization": named})
    return dataclasses.replace(source, model=named)


def evaluate_two(
    names: Sequence[str],
    count: int,
    source: ModelOptions,
    named: str,
    given: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Score two models on the same instances with the same sampling, and print the figures.

    Arguments:
    - `names`, `count`: the tasks, and the instances of each.
    - `source`, `named`: as `other_model` takes them. The defaults of sampling are those of the first model.
    - `given`: the sampling options that were typed.
    - `as_json`: print one JSON object, and not a table.

    Raises `RequestError` and `ConfigError` before a model is loaded, where either cannot do what is asked.
    """
    from jdllm.demo.compare import compare, render_comparisons
    from jdllm.demo.evaluate import TEST_SEED
    from jdllm.demo.tasks import test_instances
    from jdllm.demo.tokenizer import plain_ids

    other = other_model(source, named)
    sampling = asked_sampling(source, given)
    check_denoises(source, f"--model {source.model}", sampling)
    check_denoises(other, f"--compare {named}", sampling)
    asked = [instance for name in names for instance in test_instances(name, count, TEST_SEED)]
    prompts = [plain_ids(instance.prompt) for instance in asked]
    with told_of_compiling():
        first = _answers(source, prompts, sampling)
        second = _answers(other, prompts, sampling)
    comparisons = compare(asked, first, second)
    if as_json:
        *tasks, together = map(dataclasses.asdict, comparisons)
        print_result(json.dumps({"tasks": tasks, "all": together}))
    else:
        print_result(render_comparisons(comparisons))


def check_denoises(source: ModelOptions, name: str, sampling: SamplingParams) -> None:
    """Raise `RequestError` or `ConfigError` for a model that cannot do the demo's tasks.

    Arguments:
    - `name`: that the command line has for the model.
    - `sampling`: what requests will ask of the model.
    """
    try:
        config = checked_config(source, sampling)
    except (RequestError, ConfigError) as error:
        raise type(error)(f"{name}: {error}") from error
    if config.in_order:
        raise RequestError(f"{name} is causal: the demo's tasks are for models that denoise")


def _answers(source: ModelOptions, prompts: list[list[int]], sampling: SamplingParams) -> "Tokens":
    """What a model generates."""
    import numpy as np

    with load_model(source) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling=sampling, progress=True)
        return np.array([output.token_ids for output in outputs], np.int32)
