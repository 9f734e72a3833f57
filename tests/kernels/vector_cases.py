"""The conformance vectors and what each of their cases is."""

from pathlib import Path

import numpy as np

VECTORS = np.load(Path(__file__).parent.parent / "data" / "vectors.npz")

# Case -> format, and how far the case's seed and stream are from random16/seed_stream.
CASES = {
    "nvfp4_tensor": ("nvfp4:tensor", None),
    "nvfp4_row": ("nvfp4:row", None),
    "nvfp4_tensor46": ("nvfp4:tensor:four_over_six", None),
    "nvfp4_row46": ("nvfp4:row:four_over_six", None),
    "nvfp4_tile": ("nvfp4:tensor:tile", None),
    "nvfp4_exact_tensor": ("nvfp4:tensor:fp8_exact", None),
    "nvfp4_exact_row": ("nvfp4:row:fp8_exact", None),
    "nvfp4_sr": ("nvfp4:tensor:sr", 1),
    "mx_e4m3": ("mxfp8:32", None),
    "mx_e2m1": ("mxfp4", None),
    "mxfp8_sr_32": ("mxfp8:32:sr", 0),
    "mxfp8_sr_128": ("mxfp8:128:sr", 0),
    "mxfp8_sr_row": ("mxfp8:row:sr", 0),
    "s2f6": ("s2f6", None),
}
