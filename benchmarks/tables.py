"""docs/results.md and the figures of the README, made from the records in benchmarks/results."""

import json
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import case_parser
from benchmarks.quality.block_tables import tables as block_tables
from benchmarks.quality.lost_tables import table as lost_table
from benchmarks.quality.prefilling_tables import table as prefilling_table
from benchmarks.quality.tables import markdown
from benchmarks.quality.tables import tables as quality_tables
from benchmarks.quality.text_tables import table as text_table
from benchmarks.record import RESULTS

ROOT = RESULTS.parents[1]
DOCUMENT = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: python3 -m benchmarks results -->", "<!-- end of figures -->"

Record = dict[str, Any]


class Section(NamedTuple):
    """Records that belong together: their names match one of `patterns`, and no earlier section's."""

    title: str
    text: str
    patterns: tuple[str, ...]


SECTIONS = (
    Section(
        "Full steps",
        "A full step is one denoising step of a whole sequence. Half of its rows are masked and evaluated."
        " `ratio` is the time of a peer over the time of jdllm in the same run. The floor is the larger of"
        " two times: the arithmetic at the matrix rate, and the bytes of the weights at the copy rate. Each"
        " run measured both rates.",
        ("step_*",),
    ),
    Section(
        "Cached steps",
        "A cached step is one step of a block of fresh rows against cached rows. The floor is the time of"
        " the bytes of weights and cache at the measured copy rate. `waited_ms` is the time of a step whose"
        " tokens the host waits for. `sustained_ms` is the time of one of many steps that run for seconds."
        " In a chain a kernel starts while the kernel before it still runs.",
        ("cached_step_*",),
    ),
    Section(
        "Whole generations",
        "A generation is 256 tokens in 256 steps, in blocks of 32, with random weights. `evaluated` counts"
        " the forward evaluations of the device. `delay` is the step of a block that refreshes the cache."
        " An empty `delay` means the default of the cache.",
        ("generate_*", "ragged_*", "fast_dllm_*"),
    ),
    Section(
        "Engine",
        "These records have the time of the engine beside the time of the device, the time to the first"
        " block, and the memory that thousands of requests leave behind.",
        ("overhead_*", "traffic_*", "first_token_*", "first_calls_*", "background_*", "compile_*"),
    ),
    Section(
        "Serving",
        "`jdllm bench serve` sent requests over HTTP on the same host. `LLM.generate` answered the same"
        " requests. Rows through static batches are of a server that answers all requests of a batch at its"
        " end, and only then takes the next batch. Rows with a scheduler are simulated from a trace."
        " Latencies are in seconds from the arrival of a request. `seconds` is the span from the first"
        " arrival to the last end.",
        ("serving_*",),
    ),
    Section(
        "Operators",
        "Single kernels ran with random data, beside the form of XLA and other libraries.",
        (
            "masked_logits_*",
            "attention*",
            "split_attention_*",
            "grouped_*",
            "skinny_*",
            "exchange*",
            "torch_*",
        ),
    ),
    Section(
        "Memory planning",
        "These records answer three questions. What fits a budget? How long does a plan take? Does a card"
        " agree with the plan? Contexts of `plan_ablation`, `plan_cards` and `plan_lmax` are by plan, but for"
        " those of other codes in `plan_lmax`, which were run. The context of `plan_longest` was run."
        " `plan_ablation` has longest contexts without mask-only logits, without a plan of lifetimes"
        " (`manager`) and without chunks.",
        ("plan_*",),
    ),
    Section(
        "Host memory",
        "In these layers the residual stream, the keys and values, or the weights lie in host memory.",
        ("tiers_*", "offloaded_*"),
    ),
    Section(
        "The bundled model",
        "The bundled model answered instances that training never saw, by cache and transfer rule. Other"
        " records tell how often the tokens of a request are the same alone and in company.",
        ("quality_*", "block_quality_*", "company_*", "eval_*"),
    ),
    Section(
        "Long contexts",
        "These records are of questions over long contexts. `prefilling_*` has times with random weights."
        " `seconds` is the time of a first question, all stages included. `second_question_s` is the time"
        " of another question over the same context. `plain_s` is the time of the exact run on the whole"
        " context. `lost_in_the_middle` has questions about one of many facts. A method is named by the"
        " tokens of a chunk x the kept chunks. A cell is exact match / selection recall. The recall is the"
        " share of questions whose fact was whole in the kept chunks. `prefilling_quality` changes one"
        " setting at a time. There the recall is the share of questions whose fact was whole in the tokens"
        " that the answer read, and `chunk_bos` tells whether each chunk begins with a token of its own. The"
        " model was trained in the layout of the build `full_mask` alone.",
        ("prefilling_*", "lost_in_the_middle*"),
    ),
    Section(
        "Causal models",
        "These records have the time to the first token of a prompt, and the time of a token of each"
        " request, with random weights. The floor of a prompt is its arithmetic at the rate of plans for an"
        " H200, with causal attention counted once. The floor of a token is the bytes of weights and keys"
        " at the rate of a copy, which the run measured.",
        ("causal_*",),
    ),
    Section(
        "Real text",
        "Published checkpoints read text. Perplexities of causal models are exact, of others an upper bound."
        " The ratio is of perplexities, and its interval is over the windows of text, which are the same for"
        " both checkpoints.",
        ("real_text_*",),
    ),
    Section("Checkpoints", "jdllm loaded and converted 16 GB of random weights.", ("load*", "convert*")),
    Section("Others", "No section above lists these records.", ("*",)),
)


class Figure(NamedTuple):
    """A figure of the README.

    - `label`: the first cell of its line.
    - `record`, `row`: the record, and values of the only row that has them.
    - `say`: takes this row and all rows of the record; returns the figure and the cell beside it.
    """

    label: str
    record: str
    row: dict[str, Any]
    say: Callable[[dict[str, Any], Sequence[dict[str, Any]]], tuple[str, str]]


def _beside_bytes(row: dict[str, Any], _: Sequence[dict[str, Any]]) -> tuple[str, str]:
    return f"{row['step_ms']:.3g} ms", f"its bytes alone {row['floor_ms']:.3g} ms"


def _beside_torch(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    [torch] = [r for r in rows if r["rows"] == row["rows"] and r["system"] == "torch-compiled"]
    return f"{row['step_ms']:.3g} ms", f"torch.compile {torch['step_ms']:.3g} ms"


def _beside_fast_dllm(row: dict[str, Any], _: Sequence[dict[str, Any]]) -> tuple[str, str]:
    peers = read("fast_dllm_llada-8b")["rows"]
    [peer] = [r for r in peers if (r["batch"], r["prompt"]) == (row["batch"], row["prompt"])]
    return _tokens(row["tokens_s"]), f"Fast-dLLM {_tokens(peer['tokens_s'])}"


def _beside_floor(row: dict[str, Any], _: Sequence[dict[str, Any]]) -> tuple[str, str]:
    return _tokens(row["tokens_s"]), f"its arithmetic alone {_tokens(row['floor_tokens_s'])}"


def _longest(row: dict[str, Any], _: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Each context with what it is: one that a plan promises, or one that was run."""
    [whole], [layers] = read("plan_longest")["rows"], read("tiers_llada-8b_residual_1048576")["rows"]
    tiered = f"{row['tiered_context']:,} planned, {layers['layers']} layers run at {layers['rows']:,}"
    return (
        f"{row['context']:,} tokens planned, {whole['context']:,} run",
        f"with host memory {tiered}; official code {row['official_bf16']:,} run",
    )


def _first_block(row: dict[str, Any], _: Sequence[dict[str, Any]]) -> tuple[str, str]:
    return f"{row['beyond_load_s']:.3g} s", f"loading {row['load_s']:.3g} s"


def _right(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    [exact] = [r for r in rows if r["policy"] == "none"]
    return f"{row['exact_match']:.1%} right", f"without a cache {exact['exact_match']:.1%}"


def _loading(row: dict[str, Any], _: Sequence[dict[str, Any]]) -> tuple[str, str]:
    return f"{row['seconds']:.3g} s", f"{row['host_peak_above_weights_bytes'] / 1e6:.0f} MB of host memory"


def _tokens(value: float) -> str:
    return f"{value:.0f} tokens/s"


_GENERATION = 'generation, `cache="dual"`, '
FIGURES = (
    Figure("full step, 4096 rows", "step_llada-8b", {"system": "jdllm", "rows": 4096}, _beside_torch),
    Figure("cached step, 32 rows against 4096", "cached_step_llada-8b", {"form": "chain"}, _beside_bytes),
    Figure(
        _GENERATION + "1 prompt of 512",
        "generate_llada-8b_dual-none-head_sparse_b1_p512",
        {"cache": "dual"},
        _beside_fast_dllm,
    ),
    Figure(
        _GENERATION + "8 prompts of 2048",
        "generate_llada-8b_dual_b8_p2048",
        {},
        _beside_fast_dllm,
    ),
    Figure(_GENERATION + "16 prompts of 512", "generate_llada-8b_dual_b16_p512", {}, _beside_fast_dllm),
    Figure(
        '32 requests of 169 to 1953 tokens, `cache="head_sparse"`',
        "ragged_llada-8b",
        {"cache": "head_sparse", "delay": 1},
        _beside_floor,
    ),
    Figure(
        "longest context in 24 GiB",
        "plan_lmax",
        {"shape": "llada-8b", "budget_gib": 24},
        _longest,
    ),
    Figure("loading from the page cache", "load", {}, _loading),
    Figure(
        "first block of a new process, beyond loading",
        "first_calls_llada-8b",
        {"code": "this", "process": "second", "call": "dual"},
        _first_block,
    ),
    Figure('bundled model, `cache="dual"`', "quality_demo_schedule", {"policy": "dual"}, _right),
)


def read(name: str) -> Record:
    """A record."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def figures() -> str:
    """The README's table, without the figures whose records do not exist yet.

    Raises `ValueError` where a figure's row is not one row of its record.
    """
    body = []
    for figure in FIGURES:
        if not (RESULTS / f"{figure.record}.json").exists():
            continue
        rows = read(figure.record)["rows"]
        found = [row for row in rows if figure.row.items() <= row.items()]
        if len(found) != 1:
            raise ValueError(f"{figure.record} has {len(found)} rows {figure.row}, expected one")
        body.append((figure.label, *figure.say(found[0], rows)))
    return markdown(("LLaDA-8B, one H200, bf16", "jdllm", "beside it"), body, 1)


def document() -> str:
    """The text of docs/results.md: a table for every record, by section."""
    left = sorted(path.stem for path in RESULTS.glob("*.json"))
    parts = [
        "# Results",
        "`python3 -m benchmarks results` wrote this page from the records in `benchmarks/results`. Do not"
        " edit the page by hand. Weights are random, of the published shapes, in bf16, unless a record says"
        " otherwise. A column with the same value in a whole table stands in front of the table. Times of"
        " different runs may differ by 5 %, because cards differ.",
    ]
    for section in SECTIONS:
        names = [name for name in left if any(fnmatch(name, pattern) for pattern in section.patterns)]
        left = [name for name in left if name not in names]
        if names:
            parts += [f"## {section.title}", section.text]
        for name in names:
            parts += record_parts(name, read(name))
    return "\n\n".join(parts) + "\n"


def record_parts(name: str, record: Record) -> Iterator[str]:
    """Heading, origin, common columns and table of one record."""
    rows = record["rows"]
    commit = f"commit {record['commit'][:10]}" if record.get("commit") else ""
    versions = (f"{package} {version}" for package, version in record["versions"].items())
    origin = f"`{record['command']}`", record["device"], record["date"], commit, *versions
    yield f"### {name}"
    yield ", ".join(filter(None, origin)) + "." + f" {record.get('note', '')}".rstrip()
    if name.startswith("quality_"):
        yield quality_tables(rows)
        return
    if name.startswith("block_quality"):
        yield block_tables(rows, record["comparisons"])
        return
    if name.startswith("lost_in_the_middle"):
        yield lost_table(rows)
        return
    if name.startswith("prefilling_quality"):
        yield prefilling_table(rows)
        return
    if name.startswith("real_text"):
        yield text_table(rows)
        return
    flat = [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    common = [c for c in columns if len(flat) > 1 and len({shown(row.get(c)) for row in flat}) == 1]
    if common:
        yield (
            "In all rows: " + ", ".join(f"{c} {shown(flat[0][c])}" for c in common if shown(flat[0][c])) + "."
        )
    kept = [column for column in columns if column not in common]
    texts = sum(any(isinstance(row.get(c), str) for row in flat) for c in kept[:2])
    yield markdown(kept, ([shown(row.get(c)) for c in kept] for row in flat), texts)


def shown(value: Any) -> str:
    """A value of a record as the tables show it: four digits of a fraction, nothing for `None`."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(document_path: Path = DOCUMENT, readme: Path = README) -> None:
    """Write docs/results.md, and the figures between the README's two marks.

    Raises `ValueError` where the README has not both marks.
    """
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} has no {BEGIN} with {END} behind it")
    readme.write_text(f"{before}{BEGIN}\n{figures()}\n{END}{after}")
    document_path.write_text(document())


def main(arguments: Sequence[str]) -> None:
    case_parser("results", __doc__, records=False).parse_args(arguments)
    write()
