"""LongBench's scores of one answer, each from 0 to 1. Source: metrics.py and eval.py of THUDM/LongBench."""
# ruff: noqa: RUF001 - Chinese punctuation is meant

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from jdllm.longbench.rouge import rouge_l
from jdllm.longbench.samples import Sample
from jdllm.longbench.templates import LONGBENCH

_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Datasets of examples, which a model goes on with: only the first line of an answer counts."""

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def longbench_score(prediction: str, sample: Sample) -> float:
    """The score of an answer by its dataset's metric: the best over the sample's answers.

    Arguments:
    - `prediction`: what the model wrote; of some datasets only its first line counts.
    - `sample`: of a dataset of LongBench.
    """
    if sample.task in _FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    score = _METRICS[LONGBENCH[sample.task].metric]
    return max(score(prediction, answer, sample.all_classes) for answer in sample.answers)


def qa_f1(prediction: str, truth: str) -> float:
    """F1 over the words of both, with repetitions; case, ASCII punctuation and articles do not count."""
    return _f1(_plain(prediction).split(), _plain(truth).split())


def qa_f1_characters(prediction: str, truth: str) -> float:
    """F1 over the characters of both, with repetitions; case, punctuation and white space do not count.

    This is InfiniteBench's score of Chinese answers. LongBench counts the words that the package `jieba`
    finds with a dictionary of its own: a large dependency for a score, and one that is no longer looked
    after. Here a character stands for a word, whatever is installed. So these scores are not LongBench's
    published ones, and the metric's name says so: compare them only with each other.
    """
    return _f1(_plain_chinese(prediction), _plain_chinese(truth))


def rouge_l_characters(prediction: str, truth: str) -> float:
    """`rouge_l` with characters for words; LongBench has the words of `jieba`: see `qa_f1_characters`."""
    return rouge_l(" ".join(prediction), " ".join(truth))


def classification(prediction: str, truth: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them, else 0.

    A named class that is part of the right one's name does not count. The published loop takes such classes
    out of the list that it walks over, and so never looks at the class after one; this one does the same.
    """
    named = [name for name in classes if name in prediction]
    kept = []
    passed_over = False
    for name in named:
        drop = not passed_over and name in truth and name != truth
        if not drop:
            kept.append(name)
        passed_over = drop
    return 1 / len(kept) if truth in kept else 0.0


def retrieval(prediction: str, truth: str) -> float:
    """The share of the numbers in an answer that equal the number of the truth, "Paragraph 7" or "段落7"."""
    found = re.search(r"(?:Paragraph |段落)(\d+)", truth)
    return count(prediction, found[1]) if found else 0.0


def count(prediction: str, truth: str) -> float:
    """The share of the numbers in an answer that are written as the truth is."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(truth) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, truth: str) -> float:
    """How alike the first line of code is: in whole percent, by the standard library's matching blocks.

    The first line without a backquote, # or // counts. The published score is `fuzz.ratio` of the package
    `fuzzywuzzy`, which is this one unless `python-Levenshtein` is installed; LongBench does not ask for it.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not re.search("`|#|//", line)), "")
    # Of long texts the matcher passes over frequent characters, even where both are the same.
    return 1.0 if code == truth else round(100 * SequenceMatcher(None, code, truth).ratio()) / 100


def _f1(prediction: Sequence[str], truth: Sequence[str]) -> float:
    common = (Counter(prediction) & Counter(truth)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(truth)
    return 2 * precision * recall / (precision + recall)


def _plain(text: str) -> str:
    text = text.lower().translate(_NO_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", text)


def _plain_chinese(text: str) -> str:
    return "".join(text.lower().translate(_NO_CHINESE_PUNCTUATION).split())


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def _without_classes(score: Callable[[str, str], float]) -> Callable[[str, str, Sequence[str]], float]:
    return functools.wraps(score)(lambda prediction, truth, _classes: score(prediction, truth))


_METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    score.__name__: _without_classes(score)
    for score in (qa_f1, qa_f1_characters, rouge_l, rouge_l_characters, retrieval, count, code_similarity)
} | {"classification": classification}
