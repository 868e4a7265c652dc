"""`jdllm generate`: text after a prompt."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jdllm.cli.options import (
    DEFAULTS,
    Alg,
    AlgTemp,
    BlockLength,
    Cache,
    CfgScale,
    Dtype,
    EntropyBound,
    Eps,
    Factor,
    FactorEnd,
    Json,
    Model,
    OfficialForcing,
    PoolKernel,
    Quota,
    RefreshDelay,
    RefreshInterval,
    Remasking,
    Retention,
    Seed,
    Steps,
    Temperature,
    Threshold,
    ThresholdStrict,
    TopK,
    TopP,
    TransferOrAdaptive,
    UndefinedTokens,
    load_model,
    sampling_params,
)
from jdllm.cli.prompt import Prompt, read_prompt
from jdllm.cli.report import print_result
from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import RequestError

if TYPE_CHECKING:
    from jdllm.llm import LLM
    from jdllm.models.tokenizer import Tokenizer
    from jdllm.outputs import RequestOutput


def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="JSON", help="Prompts as ids instead of text, such as '[[5,6,7]]'.")
    ] = None,
    model: Model = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
    gen_length: Annotated[int, typer.Option(help="Tokens to generate.")] = DEFAULTS.gen_length,
    steps: Steps = DEFAULTS.steps,
    block_length: BlockLength = DEFAULTS.block_length,
    temperature: Temperature = DEFAULTS.temperature,
    cfg_scale: CfgScale = DEFAULTS.cfg_scale,
    remasking: Remasking = DEFAULTS.remasking,
    transfer: TransferOrAdaptive = DEFAULTS.transfer,
    threshold: Threshold = DEFAULTS.threshold,
    threshold_strict: ThresholdStrict = DEFAULTS.threshold_strict,
    factor: Factor = DEFAULTS.factor,
    factor_end: FactorEnd = DEFAULTS.factor_end,
    entropy_bound: EntropyBound = DEFAULTS.entropy_bound,
    alg: Alg = DEFAULTS.alg,
    alg_temp: AlgTemp = DEFAULTS.alg_temp,
    eps: Eps = DEFAULTS.eps,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    quota: Quota = DEFAULTS.quota,
    undefined_tokens: UndefinedTokens = DEFAULTS.undefined_tokens,
    seed: Seed = DEFAULTS.seed,
    early_stop: Annotated[
        bool, typer.Option(help="Stop after the block in which the text ends, and cut the token ids there.")
    ] = DEFAULTS.early_stop,
    logits_eos_inf: Annotated[
        bool, typer.Option("--logits-eos-inf", help="Never choose the end-of-sequence id.")
    ] = DEFAULTS.logits_eos_inf,
    confidence_eos_eot_inf: Annotated[
        str | None, typer.Option(metavar="official|fixed", help="Commit end ids as late as possible.")
    ] = DEFAULTS.confidence_eos_eot_inf,
    prompt_masks: Annotated[
        str, typer.Option(metavar="error|official", help="What to do with mask ids in a prompt.")
    ] = DEFAULTS.prompt_masks,
    confidence_dtype: Annotated[
        str, typer.Option(metavar="float32|model", help="Type that confidences are rounded to.")
    ] = DEFAULTS.confidence_dtype,
    cache: Cache = DEFAULTS.cache,
    retention: Retention = DEFAULTS.retention,
    pool_kernel: PoolKernel = DEFAULTS.pool_kernel,
    refresh_delay: RefreshDelay = DEFAULTS.refresh_delay,
    refresh_interval: RefreshInterval = DEFAULTS.refresh_interval,
    official_forcing: OfficialForcing = DEFAULTS.official_forcing,
    verifier: Annotated[
        str | None, typer.Option(metavar="DIR", help="Autoregressive model for --transfer adaptive.")
    ] = None,
    mixture_weight: Annotated[
        float | None, typer.Option(help="Adaptive: the diffusion model's share of the mixture.")
    ] = DEFAULTS.mixture_weight,
    max_lookahead: Annotated[
        int | None, typer.Option(help="Adaptive: masked positions that a step drafts.")
    ] = DEFAULTS.max_lookahead,
) -> None:
    """Generate text after a prompt.

    The prompt comes from one of: the argument, --file, --token-ids, or standard input; a line break at the
    very end of a file or of standard input is dropped. In a terminal the text fills in while it denoises.
    Where the model has no tokenizer the generated ids are printed instead.
    """
    sampling = sampling_params(ctx)
    given = read_prompt(prompt, file, token_ids)
    if chat and given.text is None:
        raise RequestError("--chat applies to a prompt of text, not to --token-ids")
    llm = load_model(model, dtype, verifier)
    if chat and given.text is not None:
        given = Prompt(llm.chat_prompt(given.text), None)
    outputs = _generate(llm, given, sampling, live=not as_json and sys.stdout.isatty(), parse_special=chat)
    if as_json:
        print_result(json.dumps({"outputs": [_json_fields(o) for o in outputs]}))
    else:
        for o in outputs:
            print_result(str(o.token_ids) if o.text is None else o.text)


def _generate(
    llm: "LLM", prompt: Prompt, sampling: SamplingParams, live: bool, parse_special: bool
) -> list["RequestOutput"]:
    text, ids = prompt
    if live and llm.tokenizer is not None:
        tokenizer = llm.tokenizer
        sequences = ids or [] if text is None else [tokenizer.encode(text, parse_special=parse_special)]
        if len(sequences) == 1:
            return _generate_live(llm, tokenizer, prompt, len(sequences[0]), sampling, parse_special)
    return llm.generate(text, prompt_token_ids=ids, sampling=sampling, parse_special=parse_special)


def _generate_live(
    llm: "LLM",
    tokenizer: "Tokenizer",
    prompt: Prompt,
    start: int,
    sampling: SamplingParams,
    parse_special: bool,
) -> list["RequestOutput"]:
    from rich.live import Live

    from jdllm.cli.live import LiveResponse

    response = LiveResponse(tokenizer.decode, start, sampling.gen_length)
    # Elsewhere than in the terminal, standard error has to stay what it is.
    with Live(response, transient=True, redirect_stderr=sys.stderr.isatty()):
        return llm.generate(
            prompt.text,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            on_step=response.take,
            parse_special=parse_special,
        )


def _json_fields(output: "RequestOutput") -> dict[str, Any]:
    timings = output.timings
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "nfe": output.nfe,
        "timings": {"queued": timings.queued, "running": timings.running, "total": timings.total},
    }
