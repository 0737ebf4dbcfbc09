"""Builds the corpus of the embedded model from the package registries; `python -m diffusiongemma.train.data --help`."""
