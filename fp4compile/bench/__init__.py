"""``fp4compile bench``: kernels, one MLP, a GPT, beside the ceilings of the same run."""
