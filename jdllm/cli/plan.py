"""`jdllm plan`: the memory of one denoising step on a card, without the card and without weights."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from jdllm.cli.engine import ModelOptions, takes_options
from jdllm.cli.groups import OptionGroup, takes_groups
from jdllm.cli.options import Json, parse_prefilling
from jdllm.cli.plan_question import Step, asked_of, assumed, card_of, checkpoint_of, config_path
from jdllm.cli.report import DOES_NOT_FIT, print_result
from jdllm.decoding.registry import NO_CACHE
from jdllm.errors import ConfigError

if TYPE_CHECKING:
    from jdllm.planning.card import Card
    from jdllm.planning.plan import Workload
    from jdllm.planning.prefilling import Question
    from jdllm.planning.question import StepQuestion


@dataclasses.dataclass(frozen=True)
class Long(OptionGroup):
    """A question over a long context."""

    prefilling: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET|JSON", help="Plan the stages of a long --context instead.", show_default=False
        ),
    ] = None
    instruction_tokens: Annotated[
        int, typer.Option(min=0, help="With --prefilling: tokens before the context.")
    ] = 32
    query_tokens: Annotated[int, typer.Option(min=1, help="With --prefilling: tokens behind it.")] = 64
    gen_length: Annotated[int, typer.Option(min=1, help="With --prefilling: tokens of the answer.")] = 32


@dataclasses.dataclass(frozen=True)
class Shown(OptionGroup):
    """What is shown of the plan of a step."""

    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the memory timeline: .png, .svg or .pdf.", show_default=False
        ),
    ] = None
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Compile the step for the card and compare.",
            show_default="on, with --json off",
        ),
    ] = None
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="Plan every way to generate, a line each. --memory may name several budgets: 8GiB,24GiB.",
        ),
    ] = False
    as_json: Json = False


@takes_options("adapter", "cache_dir", "verifier_shares_ids")
@takes_groups
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint directory, hub id, GGUF file, or path of a config.json.",
            show_default=False,
        ),
    ],
    *,
    step: Step,
    long: Long,
    shown: Shown,
    source: ModelOptions,
) -> None:
    """Plan the memory of one denoising step, the longest context that fits, and the KV pool of `LLM`.

    Needs a configuration only: no weights and no GPU. A context that does not fit ends with exit code 3.
    With --prefilling it plans what a question over a context of any length takes, stage by stage. Of a causal
    model it says how a prompt is read, and how fast tokens follow; of a block model how fast evaluations do.
    With --table it says of every way to generate what fits, how long a step takes, and what is cut.
    """
    memory = source.given["memory"]
    card = card_of(step.target, memory)
    path = config_path(model)
    if shown.table:
        lines = [] if shown.as_json else assumed(step.target, memory, card)
        _plan_table(_budgets(source, path, card, step), lines, long, step, shown)
        return
    asked = asked_of(source.given, path, card, step)
    if asked.workload.config.in_parts:
        _check_parts(asked.workload, long)
        _plan_parts(asked, _adapter_bytes(source, path, asked.workload), shown.as_json)
    elif long.prefilling is not None:
        _plan_prefilling(asked, long.prefilling, _question(step.context, long), shown.as_json)
    else:
        lines = [] if shown.as_json else assumed(step.target, memory, card)
        _plan_step(asked, memory, lines, shown)


def _plan_step(asked: "StepQuestion", memory: str | None, assumed: list[str], shown: Shown) -> None:
    from jdllm.cli import plan_report
    from jdllm.planning.answer import make_report

    report = make_report(asked)
    if shown.plot is not None:
        plan_report.draw(report, shown.plot, memory)
    check = not shown.as_json if shown.check is None else shown.check
    if asked.workload.config.cards > 1:
        if shown.check:
            raise ConfigError("--check compiles a step for one card: leave it out with --devices")
        check = False
    compiled = plan_report.compiled_bytes(report) if check and report.layered is None else None
    if shown.as_json:
        print_result(json.dumps(plan_report.facts(report, compiled)))
    else:
        parts = plan_report.describe(report), plan_report.compared(report, compiled, check)
        print_result("\n".join([*assumed, *parts, "", plan_report.describe_engine(report)]))
    if report.refusal is not None:
        _does_not_fit(str(report.refusal))


def _budgets(source: ModelOptions, path: Path, card: "Card", step: Step) -> "list[StepQuestion]":
    """The question for each budget, an adapter for drafts counted as overhead."""
    from jdllm.planning.sharing import less

    memory, questions = source.given["memory"], []
    for text in [None] if memory is None else memory.split(","):
        asked = asked_of({**source.given, "memory": text}, path, card, step)
        adapter = _adapter_bytes(source, path, asked.workload)
        questions.append(dataclasses.replace(asked, budget=less(asked.budget, adapter)))
    return questions


def _plan_table(
    questions: "list[StepQuestion]", assumed: list[str], long: Long, step: Step, shown: Shown
) -> None:
    from jdllm.cli.plan_table import Planned, describe_ways, lacking, way_facts
    from jdllm.planning.ways import every_way

    for name, given in (("--plot", shown.plot), ("--check", shown.check)):
        if given:
            raise ConfigError(f"{name} is for the plan of one step: leave it out with --table")
    if step.cache_policy != NO_CACHE:
        raise ConfigError("--table has a line for each cache: leave --cache-policy out")
    _check_parts(questions[0].workload, long)
    settings, question = parse_prefilling(long.prefilling or "dream"), _question(step.context or 1, long)
    planned = [Planned(asked, every_way(asked, settings, question)) for asked in questions]
    if shown.as_json:
        print_result(json.dumps(way_facts(planned)))
    else:
        print_result("\n".join([*assumed, describe_ways(planned)]))
    if lacks := lacking(planned):
        _does_not_fit(f"{lacks}: raise --memory or --host-memory")


def _check_parts(workload: "Workload", long: Long) -> None:
    """Raise `ConfigError` where a long context cannot be prepared because prompts are read in parts."""
    if workload.config.in_parts and long.prefilling is not None:
        kind = "causal" if workload.config.in_order else "block"
        raise ConfigError(f"--prefilling is for models that see all tokens: leave it out for a {kind} model")


def _adapter_bytes(source: ModelOptions, path: Path, workload: "Workload") -> int:
    """Bytes of the adapter with which a model drafts, where its checkpoint brings one that somebody wants."""
    from jdllm.checkpoints.adapters import adapter_bytes

    if source.given["plain_drafts"] or not workload.config.in_parts:
        return 0
    return adapter_bytes(checkpoint_of(path), workload.config, workload.dtype)


def _plan_parts(asked: "StepQuestion", adapter: int, as_json: bool) -> None:
    """Plan a prompt that is read in parts, beside an adapter of so many bytes."""
    from jdllm.cli.plan_blocks import block_facts, describe_blocks
    from jdllm.cli.plan_causal import causal_facts, describe_causal
    from jdllm.planning.blocks import plan_blocks
    from jdllm.planning.causal import plan_causal
    from jdllm.planning.sharing import less

    workload, target = asked.workload, asked.card.target
    account = dataclasses.replace(asked, budget=less(asked.budget, adapter)).account()
    if workload.config.in_order:
        plan = plan_causal(workload, account, target, asked.context)
        told, said = causal_facts(account, plan), describe_causal(workload, account, target, plan)
        longest = max(plan.longest, plan.longest_layered)
    else:
        plan = plan_blocks(workload, account, target, asked.context)
        told = block_facts(account, plan, adapter)
        said = describe_blocks(workload, account, target, plan, adapter)
        longest = plan.longest
    print_result(json.dumps(told) if as_json else said)
    if not plan.fits:
        _does_not_fit(
            f"a prompt of {plan.prompt} tokens does not fit, and the longest that does has {longest}:"
            " shorten it, or raise --memory or --host-memory"
        )


def _question(context: int | None, long: Long) -> "Question":
    from jdllm.planning.prefilling import Question

    if context is None or context < 1:
        raise ConfigError("--prefilling plans a long context: give its tokens, as --context 131072")
    return Question(context, long.instruction_tokens, long.query_tokens, long.gen_length, long.gen_length)


def _plan_prefilling(asked: "StepQuestion", prefilling: str, question: "Question", as_json: bool) -> None:
    from jdllm.cli.plan_prefilling import describe_stages, stage_facts
    from jdllm.planning.prefilling import LongPlan

    workload, settings = asked.workload, parse_prefilling(prefilling)
    plan = LongPlan(workload, asked.account(), asked.card.target, settings, question)
    print_result(json.dumps(stage_facts(plan)) if as_json else describe_stages(plan))
    if (lacks := plan.lacking) is not None:
        _does_not_fit(f"{lacks}: raise --memory, or keep fewer chunks or tokens of each")


def _does_not_fit(why: str) -> NoReturn:
    """End the command, whose plan is printed already."""
    typer.echo(f"error: {why}", err=True)
    raise typer.Exit(DOES_NOT_FIT)
