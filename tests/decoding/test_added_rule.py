"""A transfer rule from outside the package: one declaration, and everything knows it."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from jdllm.api.app import create_app
from jdllm.api.metrics import Metrics
from jdllm.api.service import Service, Settings
from jdllm.cli import app
from jdllm.cli.generate import generate
from jdllm.compiling.executable import Program
from jdllm.compiling.executables import Executables
from jdllm.compiling.key import program_key
from jdllm.decoding.kinds import Share
from jdllm.decoding.option import Option
from jdllm.decoding.registry import numbered, register, unregister
from jdllm.decoding.sampling import SamplingParams
from jdllm.decoding.schedule import block_steps
from jdllm.decoding.transfer.of_rules import OfRules
from jdllm.decoding.transfer.quota import QUOTA
from jdllm.decoding.transfer.ranking import Ranked, RuleParams, State
from jdllm.decoding.transfer.rule import Acceptance, StateArray, TransferRule
from jdllm.errors import ConfigError, RequestError
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from jdllm.serving.async_engine import AsyncEngine
from jdllm.serving.request import Request
from jdllm.serving.rule_states import hand_out, packed_states
from jdllm.serving.spec import generation_spec
from tests.cli.helpers import IDS as IDS_OPTION
from tests.cli.helpers import assert_mistake
from tests.cli.test_options import Listener
from tests.conftest import BUDGET, LLADA
from tests.decoding import oracle
from tests.decoding.test_added_policy import policy as policy
from tests.decoding.test_against_oracle import IDS, RAGGED, check, logits_of, prompts, sampled
from tests.engines import engine_of, entry_of, finish


def accept(ranked: Ranked, params: RuleParams, segments: int, state: State) -> tuple[Any, State]:
    """Rows whose confidence was ever so high in this block as a threshold that falls from step to step."""
    fallen = jnp.append(state["fallen"], 0.0)[ranked.segment]
    best = jnp.maximum(state["best"], ranked.confidence)
    commit = (best >= params.options["falling_from"] - fallen) | (ranked.rank == 0)
    by = jnp.zeros(segments + 1).at[ranked.segment].max(params.options["falling_by"])
    return commit, {"fallen": state["fallen"] + by[:segments], "best": best}


RULE = TransferRule(
    "transfer",
    "falling",
    "all that were ever so sure as a threshold that falls",
    Acceptance(
        "falling", accept, state=(StateArray("fallen", "float32", 0), StateArray("best", "float32", -1, True))
    ),
    options=(
        Option("falling_from", Share, 0.9, "where the threshold begins. It falls later.", np.float32),
        Option("falling_by", Share, 0.125, "how far the threshold falls in a step.", np.float32),
    ),
)


def asked(**options: Any) -> SamplingParams:
    """Options that type checkers do not know."""
    return SamplingParams(**options)


@pytest.fixture(scope="module")
def rule() -> Iterator[TransferRule]:
    register(RULE)
    yield RULE
    unregister(RULE)


def falling(**options: Any) -> SamplingParams:
    return sampled(transfer="falling", **options)


def expected(model: LLM, prompt: np.ndarray, sampling: SamplingParams) -> list[np.ndarray]:
    """The sequence after every step, by NumPy."""
    options = vars(sampling)
    length = sampling.block_length or sampling.gen_length
    x = np.concatenate([prompt, np.full(sampling.gen_length, IDS.mask)])
    states: list[np.ndarray] = []
    for start in range(len(prompt), len(x), length):
        threshold, best = options.get("falling_from", 0.9), dict.fromkeys(range(start, start + length), -1.0)
        while masked := [at for at in range(start, start + length) if x[at] == IDS.mask]:
            logits = logits_of(model)(x).astype(np.float64)
            chosen = {at: oracle.choose(logits[at], at, len(states), sampling, IDS) for at in masked}
            best |= {at: max(best[at], confidence) for at, (_, confidence) in chosen.items()}
            surest = max(masked, key=lambda at: (chosen[at][1], -at))
            for at in masked:
                if at == surest or best[at] >= threshold:
                    x[at] = chosen[at][0]
            threshold -= options.get("falling_by", 0.125)
            states.append(x.copy())
    return states


ASKED = [
    {"falling_from": 0.5, "falling_by": 0.0625},
    {"falling_from": 0.25, "falling_by": 0.03125, "block_length": 4},
    {"falling_from": 0.6, "temperature": 1.0, "seed": 3},
    {},
]


@pytest.mark.usefixtures("rule")
def test_each_step_is_that_of_the_oracle(stopping_llm: LLM):
    sampling = [falling(**options) for options in ASKED]
    ids = prompts(len(sampling), seed=3)
    outputs = stopping_llm.generate(prompt_token_ids=ids, sampling=sampling)
    check(outputs, [expected(stopping_llm, x, s) for x, s in zip(ids, sampling, strict=True)])
    assert any(output.nfe < 8 for output in outputs)  # several tokens in a step


@pytest.mark.usefixtures("rule")
def test_state_lasts_where_others_end_a_dispatch(stopping_llm: LLM):
    """A dispatch ends whenever a block of the company does, long before the rule's own block."""
    own, other = falling(**ASKED[0]), [RAGGED["blocks"], RAGGED["more steps than masks"]]
    ids = prompts(3, seed=3)
    output, *others = stopping_llm.generate(prompt_token_ids=ids, sampling=[own, *other])
    check([output], [expected(stopping_llm, ids[0], own)])
    slow = zip(ids[1:], other, strict=True)
    check(others, [oracle.generate(logits_of(stopping_llm), x, s, IDS) for x, s in slow])


@pytest.mark.usefixtures("rule", "policy")
@pytest.mark.slow
def test_state_lasts_from_refreshes_to_reuses(stopping_llm: LLM):
    """Refreshes and reuses take turns; with a cache that stores nothing all of them are exact."""
    sampling, ids = falling(**ASKED[1], cache="far", margin=100), prompts(2, seed=5)
    outputs = stopping_llm.generate(prompt_token_ids=ids, sampling=sampling)
    check(outputs, [expected(stopping_llm, x, sampling) for x in ids])


@pytest.mark.slow
@pytest.mark.usefixtures("rule", "policy")
@pytest.mark.parametrize("cache", [{}, {"cache": "far", "margin": 3}], ids=["none", "far"])
def test_tokens_do_not_depend_on_the_length_of_a_dispatch(
    cache: dict[str, Any], params: Params, config: ModelConfig, executables: Executables
):
    sampling = falling(**ASKED[0], **cache).changed(return_history=False)
    requests = [Request(generation_spec(x, sampling, config)) for x in prompts(2, seed=3)]
    runs = [
        finish(engine_of(params, config, executables, BUDGET), requests, updates=updates)[1]
        for updates in ("every", "none")
    ]
    for one, several in zip(*runs, strict=True):
        np.testing.assert_array_equal(one.tokens, several.tokens)
        assert one.steps == several.steps < 8


@pytest.mark.usefixtures("rule")
def test_a_request_that_goes_back_has_the_state_of_then(config: ModelConfig):
    request = Request(generation_spec([5, 6], falling(block_length=4), config))

    def step(fallen: float, best: list[float]) -> None:
        positions = request.candidates()
        trace = {"fallen": np.array([fallen]), "best": np.array(best)}
        hand_out({"falling": trace}, [request], [positions])
        request.advance(positions[:1], np.array([7]), np.zeros(1))

    step(0.5, [0.1, 0.2, 0.3, 0.4])
    request.store(np.arange(10), 0)
    step(0.75, [0.5, 0.6, 0.7])
    packed = packed_states([request], [request.candidates()], entry_of([request]))["falling"]
    assert packed["fallen"][0] == np.float32(0.75)
    np.testing.assert_allclose(packed["best"][:3], [0.6, 0.7, -1])  # the third is of the next block
    request.go_back()
    assert request.rule_state["fallen"] == 0.5
    np.testing.assert_allclose(request.rule_state["best"], [-1, -1, 0.1, 0.2, 0.3, 0.4, *[-1] * 4])
    for left in (3, 2, 1):
        step(1.0, [0.9] * left)
    assert request.rule_state["fallen"] == 0  # a new block
    assert (request.rule_state["best"] == -1).all()


@pytest.mark.usefixtures("rule")
def test_requests_may_ask_for_it():
    sampling = asked(transfer="falling", falling_by=np.float32(0.5))
    assert vars(sampling)["falling_by"] == 0.5
    assert sampling.effective("falling_from") == 0.9
    assert "falling_by=0.5" in repr(sampling)
    assert sampling != asked(transfer="falling")
    assert sampling.changed(falling_by=None) == asked(transfer="falling")
    assert sampling.changed(transfer="schedule") == SamplingParams()
    with pytest.raises(RequestError, match=r"^falling_by is 2, expected a number from 0 to 1 or None$"):
        sampling.changed(falling_by=2)
    with pytest.raises(RequestError, match=r"^falling_by has no effect here: it needs transfer 'falling'$"):
        asked(falling_by=0.5)


@pytest.mark.usefixtures("rule")
def test_the_command_line_has_its_options(monkeypatch: pytest.MonkeyPatch):
    parameters = inspect.signature(generate).parameters
    option = parameters["falling_from"].annotation.__metadata__[0]
    assert option.metavar == "NUMBER"
    assert option.help == "Where the threshold begins. [default: 0.9]"
    assert "falling" in parameters["transfer"].annotation.__metadata__[0].metavar.split("|")
    listener = Listener()
    monkeypatch.setattr("jdllm.cli.generate.load_model", lambda *_: listener)
    command = ["generate", "--model", str(LLADA.directory), *IDS_OPTION, "--falling-by", "0.25"]
    CliRunner().invoke(app, [*command, "--transfer", "falling"])
    assert listener.asked == [asked(transfer="falling", falling_by=0.25)]
    assert_mistake(
        CliRunner().invoke(app, command), "--falling-by has no effect here: it needs --transfer 'falling'"
    )


@pytest.fixture
def client(stopping_llm: LLM) -> Iterator[TestClient]:
    engine = AsyncEngine(stopping_llm.engine)
    metrics = Metrics("m", stopping_llm.engine, stopping_llm.executables)
    settings = Settings(names=("m",), default_sampling=stopping_llm.default_sampling(), max_queue=4)
    service = Service(stopping_llm, engine, settings, metrics)
    with TestClient(create_app(service)) as client:
        yield client
    service.close()
    engine.close()


@pytest.mark.usefixtures("rule")
def test_the_schema_and_the_server_know_it(client: TestClient):
    schemas: Mapping[str, Any] = client.get("/openapi.json").json()["components"]["schemas"]
    shown = schemas["CompletionRequest"]["properties"]
    assert shown["falling_from"]["x-used-when"] == {"transfer": ["falling"]}
    assert shown["falling_from"]["description"] == "Where the threshold begins. [default: 0.9]"
    assert {"maximum": 1, "minimum": 0, "type": "number"} in shown["falling_from"]["anyOf"]
    assert "falling" in str(shown["transfer"])
    assert shown["threshold"]["x-used-when"] == {
        "transfer": ["threshold", "falling_threshold", "dynamic", "lossy_speculation"],
        "alg": ["confidence_threshold"],
    }
    asked = {"prompt": [5, 6, 7], "gen_length": 8, "transfer": "falling", "falling_from": 3}
    refused = client.post("/v1/completions", json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "falling_from")
    answer = client.post("/v1/completions", json=asked | {"falling_from": 0.5})
    assert answer.status_code == 200
    assert "ignored_fields" not in answer.json()


def key(rules: OfRules) -> str | None:
    program = Program(block_steps, (rules,), {})
    device = jnp.zeros(1).devices()
    return program_key(program, {}, "auto", tuple(device))


def test_other_rules_are_other_executables():
    own = [(number, one) for number, one in numbered() if one.name != "falling"]
    kept = key(OfRules({}, own))
    assert kept is not None
    assert kept == key(OfRules({}, own))
    assert kept != key(OfRules({}, own[1:]))
    outside = Acceptance("outside", accept)
    assert key(OfRules({}, [*own, (99, outside)])) is None  # keys know the sources of this package only


def test_a_name_is_given_once(rule: TransferRule):
    with pytest.raises(ConfigError, match="transfer 'falling' is registered already"):
        register(rule)
    other = Option("threshold", int, 3, "something else.")
    with pytest.raises(ConfigError, match="an option 'threshold' is registered already"):
        register(TransferRule("transfer", "other", "", None, options=(other,)))
    with pytest.raises(ConfigError, match="an acceptance 'quota' is registered already"):
        register(TransferRule("transfer", "other", "", Acceptance("quota", accept)))


def test_what_is_unregistered_is_unknown():
    brief = TransferRule("alg", "brief", "a quota", QUOTA, options=(Option("brevity", Share, 0.5, "none."),))
    register(brief)
    assert asked(alg="brief", brevity=0.25).effective("brevity") == 0.25
    before = numbered()
    unregister(brief)
    assert numbered() == before  # others have the same acceptance
    with pytest.raises(RequestError, match=r"^alg is 'brief', expected one of 'origin', 'maskgit_plus', "):
        asked(alg="brief")
    with pytest.raises(RequestError, match=r"^there is no parameter brevity$"):
        asked(brevity=0.25)
    assert "brevity" not in inspect.signature(generate).parameters
