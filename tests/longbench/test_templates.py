"""The prompts are the benchmarks' own, to the letter."""

import hashlib
import json

import pytest

from jdllm.longbench.templates import BENCHMARKS, INFINITEBENCH, LONGBENCH

PUBLISHED = {
    # Of config/dataset2prompt.json, and of src/prompt.py with {input} for {question}, as sorted JSON.
    "longbench": "2dda2560eb9b520bde3515cfa4107f6fb73cb1e2e9f994ecbb9dfd11b5a247ba",
    "infinitebench": "3e963984b7837c2ef8c9737426dc5b5803b75cfeef64241edce48cbee11a1bcf",
}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_templates_are_the_published_ones(benchmark: str):
    templates = {name: dataset.template for name, dataset in BENCHMARKS[benchmark].items()}
    text = json.dumps(templates, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == PUBLISHED[benchmark]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_prompt_has_one_context_and_goes_on_after_it(benchmark: str):
    for dataset in BENCHMARKS[benchmark].values():
        before, context, after = dataset.template.partition("{context}")
        assert before
        assert context
        assert after
        assert "{context}" not in after


def test_lengths_are_the_published_ones():
    """Of dataset2maxlen.json and `DATA_NAME_TO_MAX_NEW_TOKENS`, by length."""
    longbench: dict[int, set[str]] = {}
    for name, dataset in LONGBENCH.items():
        longbench.setdefault(dataset.max_new_tokens, set()).add(name)
    assert longbench[512] == {"gov_report", "qmsum", "multi_news", "vcsum"}
    assert longbench[128] == {"narrativeqa", "qasper", "dureader", "samsum"}
    assert longbench[64] == {"multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"}
    retrieval = {"passage_count", "passage_retrieval_en", "passage_retrieval_zh"}
    assert longbench[32] == {"hotpotqa", "2wikimqa", "musique", "triviaqa", *retrieval}
    assert {name: dataset.max_new_tokens for name, dataset in INFINITEBENCH.items()} == {
        "passkey": 6,
        "number_string": 12,
        "kv_retrieval": 50,
        "longbook_sum_eng": 1200,
        "longbook_choice_eng": 40,
        "longbook_qa_eng": 40,
        "longbook_qa_chn": 40,
        "longdialogue_qa_eng": 40,
        "math_find": 3,
        "math_calc": 30000,
        "code_run": 5,
        "code_debug": 5,
    }
