"""Text from a stream of tokens: what comes out of `push` is final and never ends inside a character.

Both kinds of tokenizer are followed exactly, so the pieces put together are what `Tokenizer.decode` gives for the
whole: byte-level BPE decodes one long byte string, with U+FFFD for what is not UTF-8; byte fallback decodes each run
of `<0xNN>` tokens at once, and a run that is not UTF-8 as a whole gives one U+FFFD a byte. Such a run is therefore
held back until another token ends it. Every token is looked at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from diffusiongemma.text.tokenizer import Tokenizer


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # byte-fallback tokens that nothing has ended yet

    def push(self, ids: Iterable[int]) -> str:
        """Take more tokens; return the text that has become certain."""
        entries = self._tokenizer.entries(ids, self._skip_special)
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"".join([data for data, _ in entries if data]))
        out = []
        for data, is_byte in entries:
            if data is None:
                continue
            if is_byte:
                self._run += data
                continue
            if self._run:
                out.append(self._end_run())
            out.append(data.decode())
        return "".join(out)

    def finish(self) -> str:
        """The text that was held back; the object is then ready for a new stream."""
        rest = self._end_run() + self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)
