"""`jdllm warmup`: compile beforehand what other commands run."""

import json

from jdllm.cli.engine import ModelArgument, ModelOptions, as_arguments, takes_model
from jdllm.cli.options import Json, WarmPrefilling, parse_prefilling
from jdllm.cli.report import print_result
from jdllm.errors import ConfigError

_NOWHERE = "there is no directory that keeps what is compiled: name one with --cache-dir"


@takes_model
def warmup(
    model: ModelArgument = None,
    prefilling: WarmPrefilling = None,
    as_json: Json = False,
    *,
    source: ModelOptions,
) -> None:
    """Compile all that requests of up to --max-num-batched-tokens rows need, and keep it.

    Commands with the same options find it in --cache-dir, and so does the library. The weights are not
    read.
    """
    from jdllm.llm import LLM

    long_settings = None if prefilling is None else parse_prefilling(prefilling)
    arguments = as_arguments(source)
    if arguments["cache_dir"] is None:
        raise ConfigError(_NOWHERE)
    llm = LLM(**arguments, load_weights=False)
    store = llm.executables.store
    if store is None:
        raise ConfigError(_NOWHERE)
    llm.engine.scheduler.share()  # a server needs more than others
    done = llm.warmup(prefilling=long_settings)
    if as_json:
        print_result(json.dumps({**done._asdict(), "cache_dir": str(store.directory)}))
    else:
        print_result(
            f"compiled {done.compiled} executables and found {done.loaded}"
            f" in {done.seconds:.1f} s, in {store.directory}"
        )
