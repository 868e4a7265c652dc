"""Checkpoints on text of your own: perplexity, and tokens per second, to compare forms of weights.

Run as `python3 -m benchmarks real_text --model PATH [PATH...] --text PATH [PATH...] [--tokens 200000]
[--context 1024] [--dtype auto] [--quantization int8] [--out DIR]`. The first checkpoint as it is is
the baseline, and each checkpoint is also measured in the forms of `--quantization`. Of directories of text
the files *.md, *.py, *.rst and *.txt are read. Whole windows of `--context` tokens are taken from all places
of the text, as many of each kind of file. A causal model says of each token how likely it is behind those
before it in its window: its perplexity is exact. Of other models it is the upper bound that masked copies of
a window give, on fewer windows (`--windows`) and with the same masks for every model. The interval of a ratio
is that of the mean difference over the windows, which are the same for both models. Bits per byte of text
compare models with different tokenizers. Generations are greedy, 64 tokens behind 256 of the text, prompts
included in their time.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from benchmarks.cases import case_parser, exit_code
from benchmarks.generations import settled
from benchmarks.quality.paired import mean_interval
from benchmarks.quality.tables import LEVEL
from benchmarks.quality.text_tables import OF, label, table
from benchmarks.quality.texts import Texts, Windows, described, read_texts, windows_of
from benchmarks.record import write
from jdllm.arguments import positive
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.decoding.sampling import SamplingParams
from jdllm.engine_options import DTYPES, QUANTIZATIONS
from jdllm.errors import ConfigError, RequestError
from jdllm.llm import LLM

NAME = "real_text"
BATCHES = (1, 8)
PROMPT, GENERATED = 256, 64


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model says of windows of text; the first token of each is given.

    - `kind`: "exact", or what kind of bound `nll` is.
    - `windows`: what was scored.
    - `nll`: of each window, minus the mean log-likelihood of a token, in nats.
    - `best`: the likeliest id in the place of each scored token; `None` where `nll` is a bound.
    - `seconds`: of scoring, without compiling.
    """

    kind: Literal["exact", "bound", "bound, block by block"]
    windows: Windows
    nll: Float[np.ndarray, " windows"]
    best: Int[np.ndarray, "windows scored"] | None
    seconds: float

    @property
    def scored(self) -> Int[np.ndarray, "windows scored"]:
        """The tokens that were scored."""
        return self.windows.ids[:, 1:]

    def perplexity(self, suffix: str | None = None) -> float:
        """Of all windows, or of those from files with a suffix."""
        kept = [suffix in (None, own) for own in self.windows.suffixes]
        return math.exp(self.nll[kept].mean())

    def bits_per_byte(self, tokenizer: Tokenizer) -> float:
        """Bits for each byte that the scored tokens stand for."""
        ids, counts = np.unique(self.scored, return_counts=True)
        pairs = zip(ids.tolist(), counts.tolist(), strict=True)
        size = sum(len(tokenizer.token_bytes(i)) * count for i, count in pairs)
        return float(self.nll.mean()) * self.scored.size / math.log(2) / size


def exact_scores(llm: LLM, windows: Windows, begin: Sequence[int]) -> Scores:
    """Scores of a model that is scored in order, as many windows at a time as one evaluation holds.

    Arguments:
    - `begin`: ids that the tokenizer puts before a text.
    """
    nll, best, total = [], [], 0.0
    at_once = max(1, llm.account.rows // (len(begin) + windows.ids.shape[1] - 1))
    for some in itertools.batched(_pairs(windows, begin), at_once):
        found, seconds, _ = settled(llm, functools.partial(llm.token_logprobs, some))
        nll += [-statistics.fmean(token.logprob for token in tokens) for tokens in found]
        best += [[token.best for token in tokens] for tokens in found]
        total += seconds
    return Scores("exact", windows, np.array(nll), np.array(best, np.int32), total)


def bound_scores(llm: LLM, windows: Windows, begin: Sequence[int], mc_num: int, seed: int) -> Scores:
    """Scores of a model that masks: estimated bounds, each window with masks of its own.

    Arguments:
    - `begin`: ids that the tokenizer puts before a text.
    - `mc_num`: masked copies of each window.
    - `seed`: of the masks of the first window; those of the next one have the next seed.
    """
    nll, total = [], 0.0
    for i, pair in enumerate(_pairs(windows, begin)):
        call = functools.partial(llm.likelihood, *pair, mc_num=mc_num, seed=seed + i)
        found, seconds, _ = settled(llm, call)
        nll.append(-found.log_likelihood / len(pair[1]))
        total += seconds
    kind = "bound, block by block" if llm.config.attention == "block_causal" else "bound"
    return Scores(kind, windows, np.array(nll), None, total)


def _pairs(windows: Windows, begin: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """What is given of each window, and what is scored."""
    return [([*begin, first], scored) for first, *scored in windows.ids.tolist()]


def generation_rates(llm: LLM, windows: Windows) -> dict[str, float]:
    """Greedy tokens per second of one request and of several at once.

    A prompt is the beginning of a window. No two prompts begin alike, so that none is stored already.
    """
    sampling = SamplingParams(max_tokens=GENERATED, early_stop=False)
    prompts = (
        np.roll(ids, -i)[:PROMPT]
        for i, ids in zip(itertools.count(), itertools.cycle(windows.ids), strict=False)
    )
    rates = {}
    for batch in BATCHES:
        outputs, seconds, _ = settled(
            llm,
            lambda batch=batch: llm.generate(
                prompt_token_ids=list(itertools.islice(prompts, batch)), sampling=sampling
            ),
        )
        rates[f"tokens_s_{batch}"] = sum(len(output.token_ids) for output in outputs) / seconds
    return rates


def compared(first: Scores, other: Scores) -> dict[str, float]:
    """How much larger the perplexity of `other` is than that of `first`, on the same windows.

    Returns `ratio`; where there are several windows, `low` and `high` of its interval, over the windows; and
    where both are exact, `same_argmax`, the share of tokens in whose place the same id is the likeliest.

    Raises `RequestError` where the two did not score the same text in the same way.
    """
    if first.kind != other.kind:
        raise RequestError(f"the perplexity of one is {first.kind}, that of the other {other.kind}")
    if not np.array_equal(first.windows.ids, other.windows.ids):
        raise RequestError("their tokenizers differ, so only bits per byte compare")
    differences = other.nll - first.nll
    result = {"ratio": math.exp(differences.mean())}
    interval = mean_interval(differences, LEVEL)
    if interval is not None:
        result |= {"low": math.exp(interval.low), "high": math.exp(interval.high)}
    if first.best is not None and other.best is not None:
        result["same_argmax"] = float((first.best == other.best).mean())
    return result


def measure(
    model: str, quantization: str | None, texts: Texts, args: argparse.Namespace
) -> tuple[Scores, dict[str, Any]]:
    """The scores of a checkpoint, and what is recorded of it alone.

    Arguments:
    - `quantization`: the form of its matrices on the device; `None` as it is.

    Raises `ConfigError` without a tokenizer, and `RequestError` for windows that are longer than the model's
    positions, or than the text.
    """
    with LLM(model, dtype=args.dtype, quantization=quantization, progress=False) as llm:
        name = named(model)
        if llm.tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer: its text cannot be read")
        limit = llm.config.rope.effective_context(llm.config.max_positions)
        if args.context > limit:
            raise RequestError(f"context is {args.context}, longer than the {limit} positions of {name}")
        exact, count = llm.config.scored_in_order, max(1, args.tokens // args.context)
        encode, begin = functools.partial(llm.tokenizer.encode, begins=False), llm.tokenizer.encode("")
        windows = windows_of(texts, encode, args.context, count if exact else min(count, args.windows))
        scores = (
            exact_scores(llm, windows, begin)
            if exact
            else bound_scores(llm, windows, begin, args.mc_num, args.seed)
        )
        kinds = list(dict.fromkeys(windows.suffixes))
        return scores, {
            "model": name,
            "quantization": quantization,
            "kind": scores.kind,
            "weights_bytes": llm.account.weights,
            "windows": len(windows.ids),
            "tokens": scores.scored.size,
            "perplexity": scores.perplexity(),
            **{OF + kind: scores.perplexity(kind) for kind in kinds if len(kinds) > 1},
            "bits_per_byte": scores.bits_per_byte(llm.tokenizer),
            "scored_tokens_s": scores.scored.size / scores.seconds,
            **generation_rates(llm, windows),
        }


def make_parser() -> argparse.ArgumentParser:
    parser = case_parser(NAME, __doc__)
    parser.add_argument("--model", nargs="+", required=True, help="checkpoints; the first is the baseline")
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="files, and directories of these")
    parser.add_argument("--tokens", type=int, default=200_000, help="of the text, for exact perplexities")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights")
    parser.add_argument(
        "--quantization", nargs="+", choices=QUANTIZATIONS, default=[], help="forms that are measured beside"
    )
    parser.add_argument("--windows", type=int, default=32, help="most windows of a model that masks")
    parser.add_argument("--mc-num", type=int, default=16, help="masked copies of each of these windows")
    parser.add_argument("--seed", type=int, default=0, help="of the masks")
    return parser


def named(path: str | Path) -> str:
    """The last part of a path, or of a hub id."""
    return Path(path).resolve().name


def command(args: argparse.Namespace) -> str:
    """What makes the record, with the names of models and files in place of their paths."""
    names = {name: [named(path) for path in getattr(args, name)] for name in ("model", "text")}
    options = {name: value for name, value in vars(args).items() if name != "out" and value != []} | names
    words = (
        [f"--{name.replace('_', '-')}", *(value if isinstance(value, list) else [str(value)])]
        for name, value in options.items()
    )
    return shlex.join(["python3", "-m", "benchmarks", NAME, *itertools.chain.from_iterable(words)])


def run(args: argparse.Namespace) -> None:
    for name in ("tokens", "windows", "mc_num"):
        positive(name, getattr(args, name), RequestError)
    if args.context < 2:
        raise RequestError(
            f"context is {args.context}, expected at least 2: the first token of a window is given"
        )
    texts = read_texts(args.text, args.tokens)
    rows, notes, first = [], [], None
    for model, quantization in itertools.product(args.model, [None, *args.quantization]):
        scores, row = measure(model, quantization, texts, args)
        first = first or scores
        if first is not scores:
            try:
                row |= compared(first, scores)
            except RequestError as error:
                notes.append(f"{label(row)} is not compared with {label(rows[0])}: {error}")
        rows.append(row)
        print(f"{label(row)}: {row['perplexity']:.4f}, {scores.seconds:.0f} s", file=sys.stderr, flush=True)
        written = {"command": command(args), "text": described(texts), "notes": notes}
        write(f"{NAME}_{rows[0]['model']}", rows, args.out, **written)
    print("\n".join([table(rows), *notes]))


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(run, make_parser().parse_args(arguments))
