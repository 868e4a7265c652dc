"""Checkpoints that write any text, and draws of forms for their answers."""

import json
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jdllm.decoding.sampling import SamplingParams
from jdllm.structured.structure import Structure
from tests.helpers import Golden

EOS = 500
"""The end of a text of "llama" and "dream"; that of "llada" is 505."""

_WORDS = ('{"', '": ', '", "', "true", "false", "null", ", ", '"}', "10", "42", "ab", "abc", "yes", "no", "é")
"""Texts of several bytes that are one token."""


def write_writing(directory: Path, family: str, eos: int = EOS) -> Path:
    """Put a recorded checkpoint of 512 ids into `directory`, with a byte-level tokenizer: an id below 256 is
    a byte, some further ones are longer texts, and `eos` ends a text."""
    for name in ("config.json", "model.safetensors"):
        (directory / name).symlink_to(Golden(family).directory / name)
    alphabet = bytes_to_unicode()
    vocabulary, merges = {alphabet[byte]: byte for byte in range(256)}, []
    for word in _WORDS:
        letters = [alphabet[byte] for byte in word.encode()]
        for end in range(2, len(letters) + 1):
            made = "".join(letters[:end])
            if made not in vocabulary:
                vocabulary[made] = len(vocabulary)
                merges.append(("".join(letters[: end - 1]), letters[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocabulary | {"</s>": eos, "<|further|>": 501}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<|further|>"])
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=template)
    made.save_pretrained(directory)
    return directory


def draw_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random JSON schema of bounded answers."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const"]
    match draw.choice(kinds + ["object", "array", "any of"] * (3 if depth else 0)):
        case "object":
            names = draw.sample(["a", "b c", "d", "é", 'f"g'], draw.randint(0, 3))
            properties = {name: draw_schema(draw, depth - 1) for name in names}
            required = [name for name in names if draw.random() < 0.6]
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            least = draw.randint(0, 2)
            items = draw_schema(draw, depth - 1)
            return {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + draw.randint(0, 2),
            }
        case "any of":
            return {"anyOf": [draw_schema(draw, depth - 1) for _ in range(2)]}
        case "enum":
            return {"enum": draw.sample([1, 2.5, "yes", "no", None, True, [1, "x"]], draw.randint(1, 4))}
        case "const":
            return {"const": draw.choice([0, "ab", {"k": [1, 2]}])}
        case "string":
            return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 6)}
        case "integer":
            return {"type": "integer", "minimum": draw.randint(-20, 0), "maximum": draw.randint(1, 500)}
        case "number":
            return {"type": "number", "minimum": draw.randint(-20, 0), "maximum": draw.randint(1, 500)}
        case kind:
            return {"type": kind}


def allows(schema: dict[str, Any], value: Any) -> bool:
    """Whether a schema of `draw_schema` allows a value: what its keywords mean, written out."""
    if "anyOf" in schema:
        return any(allows(one, value) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return json.dumps(value) in map(json.dumps, known)
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer" | "number" as kind:
            number = isinstance(value, int if kind == "integer" else int | float) and not isinstance(
                value, bool
            )
            return number and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "array":
            long = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return long and all(allows(schema["items"], one) for one in value)
    named = isinstance(value, dict) and set(schema["required"]) <= value.keys() <= schema["properties"].keys()
    return named and all(allows(schema["properties"][name], one) for name, one in value.items())


PATTERNS = (
    r"[a-c]{2,5}",
    r"(yes|no|maybe)( indeed)?",
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
    r"(é|→){1,3}!",
)

SUMS = 'start: number ("+" number)*\nnumber: /[1-9]/ /[0-9]/?\n'
"""A grammar of sums."""

SUM = re.compile(r"[1-9][0-9]?(\+[1-9][0-9]?)*")


def has_form(structure: dict[str, Any], text: str) -> bool:
    match structure:
        case {"regex": pattern}:
            return re.fullmatch(pattern, text) is not None
        case {"grammar": _}:
            return SUM.fullmatch(text) is not None
        case {"choice": texts}:
            return text in texts
        case {"json_schema": schema}:
            return allows(schema, json.loads(text))
    return isinstance(json.loads(text), dict)


def asking(structure: dict[str, Any], **own: Any) -> SamplingParams:
    return SamplingParams(structure=Structure(**structure), **own)


def draw_structure(draw: random.Random) -> dict[str, Any]:
    match draw.choice(["json_schema"] * 4 + ["regex", "grammar", "choice"]):
        case "json_schema":
            return {"json_schema": draw_schema(draw)}
        case "regex":
            return {"regex": draw.choice(PATTERNS)}
        case "grammar":
            return {"grammar": SUMS}
    return {"choice": draw.sample(["yes", "no", "nope", "é→", 'a "b"\\', "line\nbreak"], draw.randint(1, 4))}
