"""ROUGE-L in the two forms that the benchmarks' published numbers are made of; neither is a plain LCS."""

import re
from collections import Counter
from collections.abc import Sequence


def rouge_l(prediction: str, truth: str) -> float:
    """F of ROUGE-L as the package `rouge` 1.0.1 computes it, which LongBench's numbers are.

    Sentences end at full stops, words at white space. Every sentence of the truth is aligned with every one
    of the prediction, and u, the distinct words in any of these alignments, is divided by n and m, the
    distinct words of prediction and truth: F = 2 p r / (p + r + 1e-8) with p = u / n and r = u / m. A
    sentence of white space only counts as one empty word. The package recurses, and LongBench scores 0 where
    that fails, at about a thousand words in one sentence; here such texts have their score.

    Returns 0 to 1; 0 where a text has no sentence. Source: pltrdy/rouge, `rouge_l_summary_level`.
    """
    ours, theirs = _sentences(prediction), _sentences(truth)
    if not ours or not theirs:
        return 0.0
    common = {
        sentence[i]
        for sentence in theirs
        for other in ours
        for i in aligned(sentence, other, prefer_first=True)
    }
    precision = len(common) / len(set().union(*ours))
    recall = len(common) / len(set().union(*theirs))
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_sum(prediction: str, truth: str) -> float:
    """F of `rougeLsum` as the package `rouge_score` 0.1.2 computes it, which InfiniteBench's summaries have.

    Sentences are lines, words are runs of ASCII letters and digits in lower case. A word of a sentence of the
    truth is hit where it is aligned with any sentence of the prediction, each word as often at most as the
    prediction holds it. Recall and precision divide the hits by the words of truth and prediction.

    Returns 0 to 1. Source: google-research/rouge, `_summary_level_lcs`.
    """
    ours, theirs = ([_words(line) for line in text.split("\n")] for text in (prediction, truth))
    held = Counter(word for sentence in ours for word in sentence)
    hit = Counter(
        sentence[i]
        for sentence in theirs
        for i in {i for other in ours for i in aligned(sentence, other, prefer_first=False)}
    )
    hits = (hit & held).total()
    if hits == 0:
        return 0.0
    precision, recall = hits / held.total(), hits / sum(map(len, theirs))
    return 2 * precision * recall / (precision + recall)


def aligned(first: Sequence[str], second: Sequence[str], *, prefer_first: bool) -> list[int]:
    """Positions of `first` that one longest common subsequence with `second` goes through.

    Arguments:
    - `prefer_first`: which one of several, where the two packages differ: walking back from the ends, whether
      a tie leaves a word of `second` out, or one of `first`.

    Returns positions in falling order.
    """
    longest = [[0] * (len(second) + 1)]
    for word in first:
        above, row = longest[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        longest.append(row)
    i, j = len(first), len(second)
    positions = []
    while i > 0 and j > 0:
        up, left = longest[i - 1][j], longest[i][j - 1]
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            positions.append(i)
        elif up > left or (up == left and not prefer_first):
            i -= 1
        else:
            j -= 1
    return positions


def _sentences(text: str) -> list[list[str]]:
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _words(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())
