"""The first example of a test may build a tokenizer, so Hypothesis sets no time limit to a single one."""

from hypothesis import settings

settings.register_profile("text", deadline=None)
settings.load_profile("text")
