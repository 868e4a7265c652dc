"""Checkpoints that read and write words."""

from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.helpers import Golden

BOS, EOS = 1, 500
"""Ids of the two special tokens, which stand in place of `w1` and `w500`."""

Begins = Literal["added", "known", "none"]
"""What a tokenizer does with BOS: put it before each text, know it only, or have none."""


def write_speaking(directory: Path, family: str, begins: Begins) -> Path:
    """Put a recorded checkpoint into `directory`, with a tokenizer in which id 5 is the word `w5`."""
    for name in ("config.json", "model.safetensors"):
        (directory / name).symlink_to(Golden(family).directory / name)
    vocabulary = {{BOS: "<s>", EOS: "</s>"}.get(i, f"w{i}"): i for i in range(512)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins == "added":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    special = {"eos_token": "</s>"} | ({} if begins == "none" else {"bos_token": "<s>"})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    return directory


def words(*ids: int) -> str:
    """The text of ids."""
    return " ".join(f"w{i}" for i in ids)
