"""How each dataset is asked and scored.

Templates are data of the benchmarks: a score means something only with the very same prompt. Sources:

- THUDM/LongBench, config/dataset2prompt.json and dataset2maxlen.json, metrics by its eval.py;
- OpenBMB/InfiniteBench, src/prompt.py (`gpt4_templates`, which the scripts of Prefilling-dLLM take too),
  lengths by `DATA_NAME_TO_MAX_NEW_TOKENS` and scores by its compute_scores.py. Two templates of that set end
  with the context; there the set for open models (`yarn_mistral_templates`) asks something behind it.
"""
# ruff: noqa: RUF001 - Chinese punctuation is meant

from collections.abc import Mapping
from typing import NamedTuple


class Form(NamedTuple):
    """What an answer looks like, as a regular expression, and an example of it."""

    pattern: str
    example: str


_ANY = Form("", "any text")
_INTEGER = Form(r"^-?[0-9]+$", "42")
_NUMBER = Form(r"^-?[0-9]+(\.[0-9]+)?$", "42")


class Dataset(NamedTuple):
    """How a dataset is asked and scored.

    - `template`: the prompt, with the names of fields in braces; `{context}` is there once, and never last.
    - `max_new_tokens`: length of an answer.
    - `metric`: name of its score.
    - `answer`: what each of its answers looks like.
    """

    template: str
    max_new_tokens: int
    metric: str
    answer: Form = _ANY


_PASSAGES = Dataset(
    "Answer the question based on the given passages. Only give me the answer and do not output any other"
    " words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based on the given"
    " passages. Only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
    32,
    "qa_f1",
)

LONGBENCH: Mapping[str, Dataset] = {
    "narrativeqa": Dataset(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the"
        " question as concisely as you can, using a single phrase if possible. Do not provide any"
        " explanation.\n\nStory: {context}\n\nNow, answer the question based on the story as concisely as you"
        " can, using a single phrase if possible. Do not provide any explanation.\n\nQuestion:"
        " {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": Dataset(
        "You are given a scientific article and a question. Answer the question as concisely as you can,"
        " using a single phrase or sentence if possible. If the question cannot be answered based on the"
        ' information in the article, write "unanswerable". If the question is a yes/no question, answer'
        ' "yes", "no", or "unanswerable". Do not provide any explanation.\n\nArticle: {context}\n\n Answer'
        " the question based on the above article as concisely as you can, using a single phrase or sentence"
        " if possible. If the question cannot be answered based on the information in the article, write"
        ' "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". Do not'
        " provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": Dataset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based"
        " on the above text, only give me the answer and do not output any other words.\n\nQuestion:"
        " {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "multifieldqa_zh": Dataset(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        "qa_f1_characters",
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": Dataset(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n"
        "请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "rouge_l_characters",
    ),
    "gov_report": Dataset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n"
        "{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the"
        " query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the"
        " above meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": Dataset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "vcsum": Dataset(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        "rouge_l_characters",
    ),
    "trec": Dataset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n"
        "{input}",
        64,
        "classification",
    ),
    "triviaqa": Dataset(
        "Answer the question based on the given passage. Only give me the answer and do not output any other"
        " words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1",
    ),
    "samsum": Dataset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n"
        "{input}",
        128,
        "rouge_l",
    ),
    "lsht": Dataset("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, "classification"),
    "passage_count": Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please"
        " carefully read these paragraphs and determine how many unique paragraphs there are after removing"
        " duplicates. In other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format"
        " should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the"
        " abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the"
        ' number of the paragraph that the abstract is from. The answer format must be like "Paragraph 1",'
        ' "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
        Form("Paragraph [0-9]", "Paragraph 1"),
    ),
    "passage_retrieval_zh": Dataset(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n'
        "答案是：",
        32,
        "retrieval",
        Form("段落[0-9]", "段落1"),
    ),
    "lcc": Dataset(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code_similarity"
    ),
    "repobench-p": Dataset(
        "Please complete the code given below. \n{context}{input}Next line of code:\n", 64, "code_similarity"
    ),
}

_OPTIONS = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"

INFINITEBENCH: Mapping[str, Dataset] = {
    "passkey": Dataset(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will"
        " quiz you about the important information there.\n\n{context}\n\n{input}",
        6,
        "first_number",
        _INTEGER,
    ),
    "number_string": Dataset(
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you about"
        " the important information there.\n\n{context}\n\n{input}",
        12,
        "first_number",
        _INTEGER,
    ),
    "kv_retrieval": Dataset(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n"
        "{input}",
        50,
        "contained_word",
    ),
    "longbook_sum_eng": Dataset("Summarize the book below.\n\n{context}\n\nSummary:", 1200, "rouge_l_sum"),
    "longbook_qa_eng": Dataset(
        "Read the book below and answer a question.\n\n{context}\n\nQuestion: {input}\n\nBe very concise.",
        40,
        "qa_f1",
    ),
    "longbook_qa_chn": Dataset(
        "请根据以下书籍回答我的问题。\n\n{context}\n\n问题：{input}\n请尽量简短地回答。",
        40,
        "qa_f1_characters",
    ),
    "longbook_choice_eng": Dataset(
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n\nOnly one of the"
        " following options is correct, tell me the answer using one single letter (A, B, C, or D). Don't say"
        " anything else.\n" + _OPTIONS,
        40,
        "choice",
    ),
    "longdialogue_qa_eng": Dataset(
        "Below is a dialogue script where one random occurrence of a character name is replaced with"
        ' "$$MASK$$", and you should try to guess who that character is.\n\nThe'
        " dialogue:\n\n---\n\n{context}\n\n---\n\nEnd of dialogue.\n\nWhich character is most likely"
        ' "$$MASK$$"? Just say the name used by the scriptwriter (before the colon marks) of one single'
        " character and nothing else.",
        40,
        "name",
    ),
    "math_find": Dataset("{prefix}\n\n{context}\n\n{input}", 3, "number", _NUMBER),
    "math_calc": Dataset(
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\n"
        "Values: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\n"
        "Values:",
        30000,
        "leading_values",
        _INTEGER,
    ),
    "code_run": Dataset(
        "Following is a set of Python functions. There is a function called named {func}.\n\n{context}\n\n"
        "Please give me the exact number of the return value of {func_call}. Be concise. Your response must"
        " end with the final returned value.",
        5,
        "last_number",
        _INTEGER,
    ),
    "code_debug": Dataset(
        "There is ONLY ONE function in the large project that is deliberately made to include an obvious"
        " error. Please find the function that contains the most obvious errors. I will give you four options"
        " to narrow your scope. You can inspect through the options and think. Eventually, tell me the answer"
        " using one single letter (A, B, C, or D).\n\n{context}\n\nWhich funtion has deliberate error?\n"
        + _OPTIONS
        + "\n\nYou should first find the functions in the options. Repeat their content, inspect through"
        " code, and at last give me your answer for the function that has the deliberate and obvious error in"
        " A, B, C, or D.",
        5,
        "option",
    ),
}

BENCHMARKS: Mapping[str, Mapping[str, Dataset]] = {"longbench": LONGBENCH, "infinitebench": INFINITEBENCH}
"""Every dataset by the name of its benchmark."""
