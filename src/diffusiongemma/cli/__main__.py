"""`python -m diffusiongemma.cli` is `dgemma`."""

from diffusiongemma.cli import main

if __name__ == "__main__":
    main()
