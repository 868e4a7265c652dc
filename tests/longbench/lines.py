"""Lines in the public format of each dataset, with an answer that scores full marks."""

import json
from pathlib import Path
from typing import Any, NamedTuple

OPTIONS = ["hide", "load", "seek", "turn"]


class Case(NamedTuple):
    """Fields of a line beside its context, and a right answer."""

    fields: dict[str, Any]
    right: str


def _longbench(name: str, right: str, answers: list[str], asked: str = "Who?", **others: Any) -> Case:
    fields = {"input": asked, "answers": answers, "length": 2, "dataset": name, "language": "en"}
    return Case({**fields, "all_classes": None, "_id": "0a1b", **others}, right)


def _infinitebench(right: str, answer: Any, asked: str = "Which one?", **others: Any) -> Case:
    return Case({"id": 0, "input": asked, "answer": answer, "options": [], **others}, right)


CASES: dict[str, dict[str, Case]] = {
    "longbench": {
        "narrativeqa": _longbench("narrativeqa", "a fox", ["wolf", "The fox."]),
        "qasper": _longbench("qasper", "yes", ["Yes"]),
        "multifieldqa_en": _longbench("multifieldqa_en", "fox", ["fox"]),
        "multifieldqa_zh": _longbench("multifieldqa_zh", "北京", ["北京。"]),
        "hotpotqa": _longbench("hotpotqa", "fox", ["fox"]),
        "2wikimqa": _longbench("2wikimqa", "fox", ["fox"]),
        "musique": _longbench("musique", "fox", ["fox"]),
        "dureader": _longbench("dureader", "北京", ["北京"]),
        "gov_report": _longbench("gov_report", "Rivers rise. So do seas.", ["Rivers rise. So do seas."], ""),
        "qmsum": _longbench("qmsum", "They met.", ["They met."]),
        "multi_news": _longbench("multi_news", "It rains.", ["It rains."], ""),
        "vcsum": _longbench("vcsum", "今天开会", ["今天开会"], ""),
        "trec": _longbench("trec", "City\nQuestion:", ["City"], all_classes=["City", "Date"]),
        "triviaqa": _longbench("triviaqa", "fox\nPassage:", ["fox"]),
        "samsum": _longbench("samsum", "They meet.\nDialogue:", ["They meet."]),
        "lsht": _longbench("lsht", "体育\n新闻", ["体育"], all_classes=["体育", "财经"]),
        "passage_count": _longbench("passage_count", "13", ["13"], ""),
        "passage_retrieval_en": _longbench("passage_retrieval_en", "Paragraph 7", ["Paragraph 7"]),
        "passage_retrieval_zh": _longbench("passage_retrieval_zh", "段落7", ["段落7"]),
        "lcc": _longbench("lcc", "# so\nreturn x", ["return x"], ""),
        "repobench-p": _longbench("repobench-p", "return x", ["return x"], "def f(x):\n"),
    },
    "infinitebench": {
        "passkey": _infinitebench("71432.", ["71432"]),
        "number_string": _infinitebench("0012", ["0012"]),
        "kv_retrieval": _infinitebench('"ab-12"', ["ab-12"]),
        "longbook_sum_eng": _infinitebench("Rivers rise", ["Rivers rise."]),
        "longbook_qa_eng": _infinitebench("fox", ["wolf", "The fox"]),
        "longbook_qa_chn": _infinitebench("北京", ["北京"]),
        "longbook_choice_eng": _infinitebench("B", ["load"], options=OPTIONS),
        "longdialogue_qa_eng": _infinitebench("Bob", ["BOB"]),
        "math_find": _infinitebench("42", 42, "The second largest number of the list is:"),
        "math_calc": _infinitebench("[8, 5]", [[8, 5]], "8 - 3"),
        "code_run": _infinitebench("is -7", [-7], "What does func_1(-3) return?"),
        "code_debug": _infinitebench("B.", ["load", "B"], options=OPTIONS),
    },
}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    """Write objects as JSON lines."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def line(
    benchmark: str, dataset: str, /, context: str = "Once upon a time.", **changed: Any
) -> dict[str, Any]:
    """A line of a dataset, with some of its fields changed."""
    return {"context": context, **CASES[benchmark][dataset].fields, **changed}
