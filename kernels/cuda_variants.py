"""The variants of the CUDA kernels that recipes use, to compile ahead of time and in CI."""

from __future__ import annotations

from collections.abc import Iterator

from . import block_scaled, cuda_fourbit, cuda_fp8, cuda_kernels, cuda_loader

BLOCK_SCALED = tuple(map(cuda_loader.architecture, block_scaled.CAPABILITIES))


def variants(
    widths: tuple[int, ...] = (4096,), block_scaled: bool = False
) -> list[tuple[str, dict[str, int]]]:
    """Source files and defines that the recipes use with BF16 tensors of ``widths`` columns.

    ``block_scaled``: operands for block-scaled tensor cores (form 3) as well.
    """
    forms = [(0, 0), (0, 2), (1, 2), (5, 0), (5, 1), (5, 2), (3, 2), (4, 0), (4, 2)]
    forms += [(mode, 3) for mode in (0, 1, 5, 3)] * block_scaled
    kinds = [
        (mode, form, act, gated, term)
        for mode, form in forms
        for act, gated, term in ((0, 0, 0), (1, 0, 3), (1, 0, 11), (2, 0, 3), (5, 1, 3))
    ]
    rows = [
        {"XD": 1, "MODE": mode, "OPERAND": form, "ACT": act, "GATED": gated, "TERM": term,
         "UP": term * gated, **cuda_kernels.row_team(width, mode, not act)[1]}
        for mode, form, act, gated, term in kinds for width in widths
    ]  # fmt: skip
    forms_of_tiles = (0, 2) + (3,) * block_scaled
    tensors = [{"XD": xd, "OPERAND": form} for xd in (0, 1) for form in forms_of_tiles]
    hidden = [
        {"XD": 1, "ZD": 1, "ACT": act, "GATED": gated, "GT": 3 * amax, "ZT": term,
         "UT": term * gated, "AMAX": amax, "FOLD": amax * (1 + 2 * gated), "ALIGNED": 1}
        for act, gated in ((1, 0), (2, 0), (5, 1)) for amax, term in ((1, 3), (1, 11), (0, 3))
    ]  # fmt: skip
    gradients = [
        {"XD": 1, "SUMS": sums, "DMODE": mode, "WMODE": mode, "DFORM": form, "WFORM": form,
         "DSR": sr, "WSR": sr, "FOLD": int(form == 1), "ALIGNED": 1, "BIG": 0, "ACROSS": 2}
        for mode, form in [(1, 1), (1, 2), (2, 2)] + [(2, 3)] * block_scaled for sums in (0, 1)
        for sr in (1, 0)
    ]  # fmt: skip
    transposes = [
        {"SOURCE": source, "FORM": form, "MODE": mode, "SR": sr, "FACTOR": factor, "BIG": 0,
         "ACROSS": 1}
        for source in (0, 1, 2, 3)
        for form, mode, sr, factor in (
            (1, 1, 0, 0), (2, 1, 0, 0), (1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 1, int(source != 1)),
            *[(3, 2, 1, int(source != 1))] * block_scaled,
        )
        if source < 3 or form == 2
    ]
    blocks = [
        {"XD": 1, "MX": mx, "SR": sr, "CODES": 1 - sr, "OPERAND": 2, "ACT": 0, "GATED": 0,
         "TERM": 0, "UP": 0, "WIDE": 1, "BIG": 0}
        for mx in (0, 1) for sr in (0, 1)
    ]  # fmt: skip
    blocks += [{**blocks[1], "OPERAND": 3}] * block_scaled
    columns = [
        {"XD": 1, "MX": mx, "SR": sr, "ROT": rotation, "FORM": 2 * sr, "SWIZZLE": 0, "FOLD": 0,
         "SUMS": sums, "ALIGNED": 1, "BIG": 0, "ACROSS": cuda_fourbit.COLUMNS_ACROSS}
        for mx, rotation in ((0, 16), (1, 32), (1, 0)) for sr, sums in ((0, 0), (1, 0), (1, 1))
    ]  # fmt: skip
    columns += [
        {**kind, "FORM": 3 * kind["SR"], "SWIZZLE": 1 - kind["SR"]} for kind in columns[:3]
    ] * block_scaled
    groups: dict[str, list[dict[str, int]]] = {
        "rows.cu": rows, "tensors.cu": tensors, "hidden.cu": hidden, "gradient.cu": gradients,
        "transposes.cu": transposes, "blocks.cu": blocks, "columns.cu": columns, "fp8.cu": _fp8(),
        "turned.cu": [{}] * block_scaled,
    }  # fmt: skip
    return [(file, defines) for file, group in groups.items() for defines in group]


def _fp8() -> list[dict[str, int]]:
    """Format fp8, whole tiles: rows, weights, activations, gradients, saved codes."""
    kinds = (
        {"ALONG": 1}, {"ALONG": 2}, {"ALONG": 1, "ACROSS": 1}, {"SAVED": 1, "ACROSS": 1},
        {"ALONG": 1, "ACROSS": 1, "SUMS": 1},
        *({"ALONG": 1, "ACT": act, "TERM": term} for act in (1, 2) for term in (0, 8)),
        {"ALONG": 1, "ACT": 5, "GATED": 1},
    )  # fmt: skip
    return [{**cuda_fp8.KINDS, "FULL": 1, **kind} for kind in kinds]


def warm(arch: str, widths: tuple[int, ...]) -> Iterator[int]:
    """Compile the usual variants for ``arch`` into the cache, no GPU needed; yields those left."""
    wanted = variants(widths, block_scaled=arch in BLOCK_SCALED)
    todo = {(file, tuple(defines.items())) for file, defines in wanted}
    while todo:
        cuda_loader.cubin(*todo.pop(), arch)
        yield len(todo)
