"""The tokenizer of a GGUF file, as the `tokenizer.json` that it was made from defines it.

Source: the converters of llama.cpp for what the metadata say, and the published `tokenizer.json` files for
the rest: normalizers and the patterns that cut a text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jdllm.errors import CheckpointError
from jdllm.gguf_files import read_gguf

_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
_NEEDED = {"llama": "scores", "gpt2": "merges"}
_SPACE = "\u2581"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Form(NamedTuple):
    """What `tokenizer.ggml.pre` stands for.

    - `pattern`: what is cut out of a text before bytes are paired; `None` for that of GPT-2.
    - `composed`: characters are composed first (NFC).
    - `whole`: what is in the vocabulary is a token, whatever its pairs.
    - `adds_bos`: where the metadata do not say.
    """

    pattern: str | None
    composed: bool = False
    whole: bool = False
    adds_bos: bool = False


_FORMS = {
    "gpt-2": _Form(None),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _Form(_LLAMA3, whole=True, adds_bos=True)),
    **dict.fromkeys(("qwen2", "bailingmoe", "bailingmoe2", "llada-moe"), _Form(_QWEN2, composed=True)),
}
"""By `tokenizer.ggml.pre`. LLaDA's pattern, which is Ling's, is written otherwise and cuts the same."""


def read_gguf_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, str]] | None:
    """Read the tokenizer of a model.

    Arguments:
    - `path`: the GGUF file, or any file of a split.

    Returns the tokenizer, and what it is given to in transformers: texts of special tokens and the chat
    template. `None` where the file has no tokens.

    Raises `CheckpointError` for a tokenizer that jdllm does not follow; a `tokenizer.json` beside the file
    takes its place.
    """
    gguf = read_gguf(path)
    values = {key.removeprefix(_KEY): value for key, value in gguf.values.items() if key.startswith(_KEY)}
    model, pre, tokens = values.get("model", "none"), values.get("pre"), values.get("tokens")
    if model == "none" or not tokens:
        return None
    kinds = values.get("token_type") or [1] * len(tokens)
    if (needed := _NEEDED.get(model)) is not None and needed not in values:
        raise CheckpointError(f"{gguf.file} lacks {_KEY}{needed}")
    if model == "llama":
        found, adds_bos = _sentence_pieces(values, kinds), True
    elif model == "gpt2" and pre in _FORMS:
        found, adds_bos = _byte_pairs(values, kinds, _FORMS[pre]), _FORMS[pre].adds_bos
    else:
        raise CheckpointError(
            f"{gguf.file} has a tokenizer of tokenizer.ggml.model {model!r} and tokenizer.ggml.pre {pre!r}:"
            f" jdllm follows the model 'llama', and 'gpt2' with {', '.join(_FORMS)}; otherwise put the"
            " tokenizer.json and tokenizer_config.json of the model beside the file"
        )
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, of in zip(tokens, kinds, strict=True) if of == kind]
        add = found.add_special_tokens if special else found.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token in added])
    special = {name: values.get(f"{key}_token_id") for name, key in _SPECIAL.items()}
    texts = {f"{name}_token": tokens[index] for name, index in special.items() if index is not None}
    _add_ends(found, texts, values, adds_bos=adds_bos)
    template = gguf.values.get("tokenizer.chat_template")
    return found, texts | ({"chat_template": template} if template else {})


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Ids by tokens. What fills the embedding up to a round size is none of them."""
    return {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}


def _byte_pairs(values: Mapping[str, Any], kinds: list[int], form: _Form) -> Tokenizer:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in values["merges"])]
    vocabulary = _vocabulary(values["tokens"], kinds)
    found = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=form.whole))
    if form.composed:
        found.normalizer = normalizers.NFC()
    if form.pattern is None:
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        cut = pre_tokenizers.Split(Regex(form.pattern), "isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        found.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    found.decoder = decoders.ByteLevel()
    return found


def _sentence_pieces(values: Mapping[str, Any], kinds: list[int]) -> Tokenizer:
    """Pairs are merged in the order of the scores of what they make."""
    vocabulary = _vocabulary(values["tokens"], kinds)
    scores = values["scores"]
    unknown = next((token for token, i in vocabulary.items() if kinds[i] == _UNKNOWN), None)
    merges = [
        (-scores[index], vocabulary[piece[:at]], vocabulary[piece[at:]], piece[:at], piece[at:])
        for piece, index in vocabulary.items()
        for at in range(1, len(piece))
        if piece[:at] in vocabulary and piece[at:] in vocabulary
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    found = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = values.get("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefixed else []
    found.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    return found


def _add_ends(
    tokenizer: Tokenizer, texts: Mapping[str, str], values: Mapping[str, Any], *, adds_bos: bool
) -> None:
    """Let a text begin and end with what the metadata say."""
    adds = {
        "bos_token": values.get("add_bos_token", adds_bos),
        "eos_token": values.get("add_eos_token", False),
    }
    begin, end = ([texts[name]] if added and name in texts else [] for name, added in adds.items())
    if begin or end:
        known = tokenizer.get_vocab()
        special = [(token, known[token]) for token in dict.fromkeys([*begin, *end])]
        single = [*begin, "$A", *end]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{part}:1" for part in [*begin, "$B", *end])],
            special_tokens=special,
        )
