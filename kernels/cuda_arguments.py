"""The parameters of the CUDA kernels, field by field as in kernels/cuda/*.cu."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p


def _struct(name: str, *fields: str, **nested: type) -> type[ctypes.Structure]:
    """A kernel's parameter: pointers, except names that start with "#" (integers) or are nested."""
    types = [
        (f.lstrip("#"), nested.get(f, c_int64 if f.startswith("#") else c_void_p)) for f in fields
    ]
    return type(name, (ctypes.Structure,), {"_fields_": types})


Term = _struct("Term", "acc", "row", "col", "bias", "#ld", "#row_stride", "#col_stride")
Rows = _struct(
    "Rows", "x", "up", "#rows", "#cols", "#padded",
    "amax", "codes", "scales", "outer", "operand", x=Term, up=Term,
)  # fmt: skip
Blocks = _struct(
    "Blocks", "x", "up", "#rows", "#cols", "#padded", "#wide", "#shift",
    "amax", "codes", "scales", "outer", "operand", "seed", "#stream", x=Term, up=Term,
)  # fmt: skip
Columns = _struct(
    "Columns", "x", "fold", "#ld", "#rows", "#cols", "#padded", "#padded_rows", "#chunk", "amax",
    "seed", "#stream", "codes", "scales", "outer", "operand", "sums",
)  # fmt: skip
Turned = _struct("Turned", "codes", "scales", "#rows", "#cols", "#padded", "#padded_rows", "out")
Amax = _struct("Amax", "x", "#rows", "#cols", "#ld", "#wide", "amax")
Tiles = _struct(
    "Tiles", "x", "#rows", "#cols", "#padded", "#ld", "#wide",
    "amax", "codes", "scales", "outer", "operand",
)  # fmt: skip
Output = _struct("Output", "values", "row_amax", "col_amax", "fold")
Hidden = _struct(
    "Hidden", "g", "z", "up", "#rows", "#cols", "#wide", "first", "second",
    g=Term, z=Term, up=Term, first=Output, second=Output,
)  # fmt: skip
Gradient = _struct(
    "Gradient", "g", "fold", "#ld", "#rows", "#cols", "#padded", "#padded_rows", "#chunk", "#wide",
    "row_amax", "col_amax", "seed", "#stream", "d", "w", "d_factor", "w_factor", "sums",
)  # fmt: skip
Fp8 = _struct(
    "Fp8", "x", "up", "saved", "saved_scales", "#rows", "#cols", "#padded", "#padded_rows",
    "#wide", "seed", "#stream", "along", "along_scales", "across", "across_scales", "sums",
    x=Term, up=Term,
)  # fmt: skip
Sums = _struct("Sums", "part", "#chunks", "#cols", "out")
Saved = _struct(
    "Saved", "codes", "scales", "factor", "#factor_stride", "#rows", "#cols", "#padded",
    "#padded_rows", "#group", "amax", "seed", "#stream", "out", "out_factor",
)  # fmt: skip
