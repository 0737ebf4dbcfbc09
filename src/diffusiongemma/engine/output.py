"""From committed tokens to committed text: never half a character, never a stop text or the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence

from diffusiongemma.text import Detokenizer, Tokenizer


class OutputText:
    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], skip_special: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._stops = tuple(stops)
        self._held = ""  # certain text that may be the beginning of a stop text
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that became certain with these tokens."""
        return self._release(self._detokenizer.push(tokens), final=False)

    def finish(self) -> str:
        return self._release(self._detokenizer.finish(), final=True)

    def _release(self, text: str, final: bool) -> str:
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
