"""`python -m diffusiongemma.bench NAME` is `dgemma bench NAME`."""

from __future__ import annotations

import sys

from diffusiongemma.bench.commands import app
from diffusiongemma.errors import DiffusionGemmaError

if __name__ == "__main__":
    try:
        app()
    except DiffusionGemmaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
