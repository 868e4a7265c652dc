"""Names that a caller has likely misspelt."""

import itertools

import pytest

from jdllm.arguments import resembling

KNOWN = (
    "n",
    "seed",
    "stop",
    "top_k",
    "top_p",
    "temperature",
    "max_tokens",
    "steps",
    "prompt",
    "return_history",
)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("tempertaure", "temperature"),
        ("temperatur3s", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("topk", "top_k"),
        ("Prompt", "prompt"),
        ("sede", "seed"),
        ("step", "steps"),
    ],
)
def test_a_misspelt_name_resembles_the_nearest(name: str, meant: str):
    assert resembling(name, KNOWN) in {meant, *({"stop"} if name == "step" else ())}


@pytest.mark.parametrize("name", ["id", "m", "", "topic", "label", "temp", "tokens", "custom_id", "index"])
def test_other_names_resemble_nothing(name: str):
    assert resembling(name, KNOWN) is None


def test_every_misspelling_by_up_to_two_edits_is_found():
    def edited(word: str) -> set[str]:
        cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
        missing = [a + b[1:] for a, b in cuts if b]
        wrong = [a + "x" + b[1:] for a, b in cuts if b]
        further = [a + "x" + b for a, b in cuts]
        return {*missing, *wrong, *further} - {"max_tokens"}

    swapped = {"amx_tokens", "mxa_tokens", "max_toknes", "max_tokesn", "amx_tokesn"}
    once = edited("max_tokens")
    for name in itertools.chain(swapped, once, *map(edited, once)):
        assert resembling(name, KNOWN) == "max_tokens"
