"""`python -m diffusiongemma` is `dgemma`."""

from diffusiongemma.cli import main

if __name__ == "__main__":
    main()
