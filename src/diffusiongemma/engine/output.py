"""From committed tokens to committed text: never half a character, never a stop text or the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence

from diffusiongemma.text import Detokenizer, Tokenizer


class OutputText:
    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._told = 0  # characters released so far
        self._stops = tuple(stops)
        self._held = ""  # certain text that may be the beginning of a stop text
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these tokens."""
        return self._release(self._detokenizer.push(tokens), final=False)

    def finish(self) -> str:
        return self._release(self._detokenizer.finish(), final=True)

    def tokens_told(self, tokens: Sequence[int]) -> int:
        """How many of the answer's tokens the released text took: those of a stop text and behind it are no part."""
        detokenizer, seen = Detokenizer(self._tokenizer, self._skip_special), 0
        for count, token in enumerate(tokens):
            if seen >= self._told:
                return count
            seen += len(detokenizer.push([token]))
        return len(tokens)

    def _release(self, text: str, final: bool) -> str:
        out = self._settle(text, final)
        self._told += len(out)
        return out

    def _settle(self, text: str, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = 0 if final else self._possible_stop()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _possible_stop(self) -> int:
        """How many characters at the end could still grow into a stop text."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
