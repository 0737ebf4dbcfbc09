"""Training: objective, data, loop, recipes."""
