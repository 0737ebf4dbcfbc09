"""The tokenizer of the embedded model: byte-level BPE with DiffusionGemma's special tokens under their own ids.

A token holds at most one digit; the space, point or minus before a digit may join it, which makes coordinates a
quarter shorter and leaves a row of digits (Sudoku, with 0 for empty) one token a cell. A line break and the indent
that follows it are one token, one for each line: indents cost nothing, and holes can be cut at line starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from diffusiongemma.train.data.extract import read_documents
from diffusiongemma.train.data.icons import prompts, read_icons

NAMED = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<|fim_prefix|>", 4: "<|fim_suffix|>", 46: "<|tool>", 47: "<tool|>",
    48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>',
    98: "<|think|>", 100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip

# In order: one digit with at most one separator; a line break with its indent; a word with at most one sign or space
# before it (` self`, `.get`, `_name`); signs with at most one space before them; spaces inside a line.
PATTERN = r"[ .\-]?\p{N}|\r?\n[ \t]*|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+"


def special_tokens() -> list[str]:
    """The texts of ids 0 to 106: DiffusionGemma's where it has one, `<unusedN>` between them."""
    unused = (f"<unused{n}>" for n in range(200))
    return [NAMED[i] if i in NAMED else next(unused) for i in range(max(NAMED) + 1)]


def untrained() -> Tokenizer:
    """The pipeline without its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterable[str], size: int = 8_192) -> Tokenizer:
    """A tokenizer of `size` entries learned from `texts`, special tokens and all bytes included."""
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special_tokens(),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=48,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as a checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(folder: Path) -> Tokenizer:
    """A saved tokenizer that spells special tokens out: training text is never control text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def sample(corpus: Path, icons: Path, megabytes: float = 60.0, seed: int = 0) -> Iterator[str]:
    """Random documents: 70% code, 12% docs, 18% icons with their prompts, by size."""
    rng = Random(seed)
    for name, share in (("code", 0.70), ("docs", 0.12)):
        texts = [document.text for document in read_documents(corpus / f"{name}.jsonl.gz")]
        yield from _draw(rng, texts, share * megabytes)
    pairs = [f"{prompts(icon)[0]}\n{icon.svg}\n" for icon in read_icons(icons / "icons_train.jsonl.gz")]
    yield from _draw(rng, pairs, 0.18 * megabytes)


def _draw(rng: Random, texts: list[str], megabytes: float) -> Iterator[str]:
    rng.shuffle(texts)
    budget = megabytes * 1e6
    for text in texts:
        if budget <= 0:
            return
        budget -= len(text)
        yield text


def bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    """How much text a token carries, on average over `texts`."""
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    return sum(len(text.encode()) for text in texts) / max(tokens, 1)
