import pytest

from jdllm.demo.evaluate import Generation, evaluate, nearest_answers, render_table
from jdllm.demo.tasks import Instance, distinct_instances
from jdllm.errors import RequestError


def adds_up_to(limit: int):
    """A sampler that answers additions right when the sum is below `limit`, in two positions a forward."""

    def generate(prompts: list[list[int]]) -> Generation:
        sums = [sum(int(n) for n in bytes(p[:-1]).decode().split("+")) for p in prompts]
        outputs = [[*str(s if s < limit else -1).encode(), 257, 257, 65] for s in sums]
        return Generation(outputs, committed=32 * len(prompts), forwards=16 * len(prompts), seconds=0.5)

    return generate


def test_exact_match_counts_right_answers():
    (right,) = evaluate(adds_up_to(10**9), ["addition"], count=200, baseline_instances=100)
    (none,) = evaluate(adds_up_to(0), ["addition"], count=200, baseline_instances=100)
    (some,) = evaluate(adds_up_to(5000), ["addition"], count=200, baseline_instances=100)
    assert (right.exact_match, none.exact_match) == (1.0, 0.0)
    assert 0.3 < some.exact_match < 0.95
    assert (right.instances, right.tokens_per_forward, right.seconds) == (200, 2.0, 0.5)


def test_baseline_knows_training_instances_only():
    (result,) = evaluate(adds_up_to(0), ["addition"], count=200, baseline_instances=500)
    assert result.baseline_instances == 500
    assert result.baseline_exact_match < 0.1


def test_nearest_answers_finds_the_same_prompt_and_the_closest_one():
    known = distinct_instances("questions", "train", 300, seed=0)
    assert nearest_answers(known, known) == [instance.answer for instance in known]
    known = [Instance("t", "abcdef", "1"), Instance("t", "uvwxyz", "2")]
    assert nearest_answers([Instance("t", "uvwxyq", ""), Instance("t", "zbcdef", "")], known) == ["2", "1"]


def test_prompts_shorter_than_a_trigram_have_features():
    known = [Instance("t", "a", "1"), Instance("t", "bc", "2")]
    assert nearest_answers(known, known) == ["1", "2"]


def test_table_names_every_figure():
    results = evaluate(adds_up_to(10**9), ["addition"], count=50, baseline_instances=50)
    header, row = render_table(results).splitlines()
    assert header.split("  ")[0] == "task"
    assert row.split() == ["addition", "50", "100.0%", row.split()[3], "2.00", "0.50"]


def test_bad_counts_are_refused():
    with pytest.raises(RequestError, match="count 0"):
        evaluate(adds_up_to(0), ["addition"], count=0)
