"""Each hot operation once: a torch reference, and beside it the kernels that must equal it."""
