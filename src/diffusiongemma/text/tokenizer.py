"""Text to token ids and back, over the `tokenizers` library and a checkpoint's tokenizer.json.

Text of a user must never turn into control tokens, so there are two library objects over one file: the one that
`encode` uses by default spells special tokens out as ordinary text; the other, for prompts that a chat template
wrote, recognises them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType

import tokenizers

from diffusiongemma.errors import TokenizerError
from diffusiongemma.text.files import TokenNames, parse_object, read_text

# Control tokens of DiffusionGemma by their text; ids always come from the file.
CONTROL_TOKENS = tuple(
    '<|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|think|> '
    "<|channel> <channel|> <|turn> <turn|>".split()
)
_CONVENTIONAL = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Entry = tuple[bytes | None, bool]  # what a token adds to the text (None: there is no such token); is it `<0xNN>`?
_NONE: Entry = (None, False)


class Tokenizer:
    """A byte-level BPE (GPT-2's kind) or a BPE with byte fallback (Gemma's kind), with special tokens by name."""

    def __init__(self, raw: str, names: TokenNames | None = None) -> None:
        """`raw` is the text of a tokenizer.json."""
        names = names or TokenNames({}, frozenset())
        data = parse_object(raw, "tokenizer.json")
        self.byte_level = _is_byte_level(data.get("decoder"))
        self._full = _build(raw)
        added = {t["content"]: t for t in data.get("added_tokens") or ()}
        wanted = {*CONTROL_TOKENS, *_CONVENTIONAL.values(), *names.named.values(), *names.extra}
        texts = {text for text, token in added.items() if token.get("special")}
        texts |= {text for text in wanted if self.token_to_id(text) is not None}
        self._full.add_special_tokens(sorted(texts - added.keys()))

        ids = {text: id for text in texts if (id := self.token_to_id(text)) is not None}
        self._special_ids = frozenset(ids.values())
        for short, text in _CONVENTIONAL.items():
            if (found := ids.get(names.named.get(f"{short}_token", text))) is not None:
                ids[short] = found
        self.special: Mapping[str, int] = MappingProxyType(ids)
        self.special_texts: frozenset[str] = frozenset(texts)
        # An unknown character may become <unk> in plain text; every other special id there would be a forgery.
        self._forbidden = self._special_ids - {ids.get("unk")}
        self.vocab_size = max(self._full.get_vocab().values(), default=-1) + 1  # every id is below this
        self._entries: dict[int, Entry] = {}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json and special_tokens_map.json."""
        return cls(read_text(Path(folder) / "tokenizer.json"), TokenNames.from_pretrained(folder))

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The twin that spells special tokens out; made when first needed, since Gemma's takes seconds to build."""
        data = json.loads(self._full.to_str())
        for token in data["added_tokens"]:  # a control token is none of the user's business, flagged or not
            token["special"] |= token["content"] in self.special_texts
        plain = _build(json.dumps(data))
        plain.encode_special_tokens = True
        return plain

    # ---- text to ids ---------------------------------------------------------------------------------------------

    def encode(self, text: str, add_bos: bool = False, allow_special: bool = False) -> list[int]:
        """Token ids of `text`. Only with `allow_special` do strings such as `<|turn>` become special tokens."""
        return self.encode_batch([text], add_bos, allow_special)[0]

    def encode_batch(self, texts: Sequence[str], add_bos: bool = False, allow_special: bool = False) -> list[list[int]]:
        start = [self._bos()] if add_bos else []
        library = self._full if allow_special else self._plain
        with _guarded("this text cannot be tokenized (is it whole characters of UTF-8?)"):
            found = library.encode_batch_fast(list(texts), add_special_tokens=False)  # without places in the text
        rows: list[list[int]] = [encoding.ids for encoding in found]
        if not allow_special and (forged := self._forbidden & set[int]().union(*rows)):
            names = ", ".join(sorted(map(self.piece, forged)))
            raise TokenizerError(f"the tokenizer makes special tokens out of ordinary text ({names}); use another one")
        return [start + row for row in rows]

    def _bos(self) -> int:
        if (bos := self.special.get("bos")) is None:
            raise TokenizerError("this tokenizer has no beginning-of-text token, so add_bos cannot be used")
        return bos

    # ---- ids to text ---------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; ids that the tokenizer does not know give nothing."""
        kept = [i for i in ids if i not in self._special_ids] if skip_special else list(ids)
        with _guarded("these token ids cannot be decoded"):
            return str(self._full.decode(kept, skip_special_tokens=False))

    def decode_batch(self, rows: Iterable[Iterable[int]], skip_special: bool = True) -> list[str]:
        return [self.decode(row, skip_special) for row in rows]

    def token_bytes(self, id: int) -> bytes | None:
        """What one token adds to the decoded text, in UTF-8, perhaps part of a character; None for an unknown id."""
        return self._entry(id)[0]

    def is_byte(self, id: int) -> bool:
        """Whether this is a byte-fallback token, `<0xNN>`."""
        return self._entry(id)[1]

    def piece(self, id: int) -> str:
        """The text of one token, for display; a part of a character shows as U+FFFD."""
        return (self.token_bytes(id) or b"").decode(errors="replace")

    def entries(self, ids: Iterable[int], skip_special: bool = False) -> list[Entry]:
        """`token_bytes` and `is_byte` of each of these, special ones perhaps left out: a text at once."""
        known, skipped = self._entries, self._special_ids if skip_special else frozenset()
        return [known.get(id) or self._entry(id) for id in ids if id not in skipped]

    def _entry(self, id: int) -> Entry:
        if (known := self._entries.get(id)) is None:
            if type(id) is int and self.vocab_size <= id < 1 << 32:
                return _NONE  # a model may have far more tokens than a tokenizer: the library need not be asked
            known = self._entries[id] = self._compute_entry(id)
        return known

    def _compute_entry(self, id: int) -> Entry:
        with _guarded(f"{id!r} is not a token id"):
            token = self._full.id_to_token(id)
        if token is None:
            return _NONE
        if self.byte_level:
            alphabet = _byte_alphabet()
            return bytes(alphabet[c] for c in token) if alphabet.keys() >= set(token) else token.encode(), False
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1]), True
        return self.decode([id], skip_special=False).encode(), False

    # ---- the vocabulary ------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The text of a tokenizer.json."""
        return self._full.to_str()

    def token_to_id(self, name: str) -> int | None:
        with _guarded(f"no token can be called {name!r}"):
            return self._full.token_to_id(name)

    def is_special(self, id: int) -> bool:
        return id in self._special_ids


def _build(raw: str) -> tokenizers.Tokenizer:
    with _guarded("tokenizer.json is damaged or of an unknown kind"):
        built = tokenizers.Tokenizer.from_str(raw)
        built.no_padding()
        built.no_truncation()
        return built


def _is_byte_level(decoder: object) -> bool:
    """True for GPT-2's decoder, False for byte fallback; any other cannot be decoded piece by piece."""
    steps = _steps(decoder)
    if "ByteLevel" in steps and set(steps) <= {"ByteLevel", "Fuse"}:
        return True
    if "ByteFallback" in steps:
        at = steps.index("ByteFallback")
        if set(steps[:at]) <= {"Replace"} and set(steps[at + 1 :]) <= {"Fuse"}:
            return False
    raise TokenizerError(
        f"tokenizer.json has the decoder {'+'.join(steps) or 'none'}; it must be ByteLevel, or ByteFallback as in Gemma"
    )


def _steps(decoder: object) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence" and isinstance(decoder.get("decoders"), list):
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [str(decoder.get("type"))]


@cache
def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE: printable Latin-1 for itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Turn the library's errors into ours; a Rust panic is no Exception in Python, and is caught by its name."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {error}") from error
        raise
