"""The kernels of ``driftgen.ops.patch_statistics``: one reads a map once, one writes its gradient once.

A map is cut into square cells of 1, 2, 4 or 8 locations a side, in which all smaller patches nest. A program
handles a tile of ``BP`` cells and ``BC`` channels, one location of all its cells at a time, so a thread holds
every location of its cells. Only the statistics of the whole map cross between threads. Squares are those of
differences from the mean of a patch. The squares of four patches are combined with the differences of their
means (Chan, Golub and LeVeque), so a large mean costs no precision.

The gradient is g + Σ (∂m + ∂s (x − m) / s) / n over the patches that contain x, with n locations each. A
patch passes the terms of the larger patches down as ``base + slope · (x − mean)``, expressed around its own
mean and with its own terms added. Means and deviations of patches are computed again, which is faster than
reading them.

Loads are issued ahead of stores, because the compiler keeps their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gradient_kernel", "statistics_kernel"]


@triton.jit
def _read(pointer, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer).to(tl.float32)
    else:
        return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, value, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointer, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _offset(
    sample, row, column, channel, SIDE: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr
):
    """Return the offset of each cell in a tensor ``[B, H, W, C]``; a cell is SIDE x SIDE vectors."""
    cell = row * (SIDE * W) + column * SIDE
    return sample * (H * W * C) + (cell * C)[:, None] + channel[None, :]


@triton.jit
def _tile(
    start, block, CELL: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Return rows, columns and channels of a tile, and its mask."""
    cell, channel = start + tl.arange(0, BP), block * BC + tl.arange(0, BC)
    inside = (cell < (H // CELL) * (W // CELL))[:, None] & (channel < C)[None, :]
    return cell // (W // CELL), cell % (W // CELL), channel, inside


@triton.jit
def _four(x, inside, W: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    """Return the locations of a 2x2 patch minus their mean, the mean, and the sum of squares."""
    a, b = _read(x, inside, EVEN), _read(x + C, inside, EVEN)
    c, d = _read(x + W * C, inside, EVEN), _read(x + (W + 1) * C, inside, EVEN)
    mean = ((a + b) + (c + d)) * 0.25
    a, b, c, d = a - mean, b - mean, c - mean, d - mean
    return a, b, c, d, mean, (a * a + b * b) + (c * c + d * d)


@triton.jit
def _union(a, squares_a, b, squares_b, c, squares_c, d, squares_d, COUNT: tl.constexpr):
    """Return mean and squares of the union of four patches of COUNT locations each."""
    mean = ((a + b) + (c + d)) * 0.25
    a, b, c, d = a - mean, b - mean, c - mean, d - mean
    between = (a * a + b * b) + (c * c + d * d)
    return mean, ((squares_a + squares_b) + (squares_c + squares_d)) + COUNT * between


@triton.jit
def _store(mean, std, value, squares, inside, COUNT: tl.constexpr, LEAST: tl.constexpr, EVEN: tl.constexpr):
    _write(mean, value, inside, EVEN)
    _write(std, tl.sqrt(squares * (1.0 / COUNT) + LEAST), inside, EVEN)


@triton.jit
def _statistics_2(
    x, mean_2, std_2, at_2, inside, LEAST: tl.constexpr, W: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr
):
    _, _, _, _, mean, squares = _four(x, inside, W, C, EVEN)
    if mean_2 is not None:
        _store(mean_2 + at_2, std_2 + at_2, mean, squares, inside, 4, LEAST, EVEN)
    return mean, squares


@triton.jit
def _statistics_4(
    x, mean_2, std_2, mean_4, std_4, at_2, at_4, inside,
    LEAST: tl.constexpr, W: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return mean and squares of a 4x4 patch; store the statistics of it and its 2x2 patches unless None."""
    _, _, _, _, a, aa = _four(x, inside, W, C, EVEN)
    _, _, _, _, b, bb = _four(x + 2 * C, inside, W, C, EVEN)
    _, _, _, _, c, cc = _four(x + 2 * W * C, inside, W, C, EVEN)
    _, _, _, _, d, dd = _four(x + (2 * W + 2) * C, inside, W, C, EVEN)
    mean, squares = _union(a, aa, b, bb, c, cc, d, dd, 4)
    if mean_2 is not None:
        down: tl.constexpr = W // 2 * C
        mean_2, std_2 = mean_2 + at_2, std_2 + at_2
        _store(mean_2, std_2, a, aa, inside, 4, LEAST, EVEN)
        _store(mean_2 + C, std_2 + C, b, bb, inside, 4, LEAST, EVEN)
        _store(mean_2 + down, std_2 + down, c, cc, inside, 4, LEAST, EVEN)
        _store(mean_2 + down + C, std_2 + down + C, d, dd, inside, 4, LEAST, EVEN)
    if mean_4 is not None:
        _store(mean_4 + at_4, std_4 + at_4, mean, squares, inside, 16, LEAST, EVEN)
    return mean, squares


@triton.jit
def _statistics_8(
    x, mean_2, std_2, mean_4, std_4, mean_8, std_8, at_2, at_4, at_8, inside,
    LEAST: tl.constexpr, W: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    down_2: tl.constexpr = W * C
    down_4: tl.constexpr = W // 4 * C
    a, aa = _statistics_4(x, mean_2, std_2, mean_4, std_4, at_2, at_4, inside, LEAST, W, C, EVEN)
    x, at_2, at_4 = x + 4 * C, at_2 + 2 * C, at_4 + C
    b, bb = _statistics_4(x, mean_2, std_2, mean_4, std_4, at_2, at_4, inside, LEAST, W, C, EVEN)
    x, at_2, at_4 = x + 4 * W * C, at_2 + down_2, at_4 + down_4
    d, dd = _statistics_4(x, mean_2, std_2, mean_4, std_4, at_2, at_4, inside, LEAST, W, C, EVEN)
    x, at_2, at_4 = x - 4 * C, at_2 - 2 * C, at_4 - C
    c, cc = _statistics_4(x, mean_2, std_2, mean_4, std_4, at_2, at_4, inside, LEAST, W, C, EVEN)
    mean, squares = _union(a, aa, b, bb, c, cc, d, dd, 16)
    if mean_8 is not None:
        _store(mean_8 + at_8, std_8 + at_8, mean, squares, inside, 64, LEAST, EVEN)
    return mean, squares


@triton.jit
def statistics_kernel(
    x, mean_2, std_2, mean_4, std_4, mean_8, std_8, mean_all, std_all, whole,
    LEAST: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CELL: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store mean and standard deviation over patches of 2x2, 4x4 and 8x8 and over the whole map, where not
    None, and mean and 1 / (n · std) of the whole map in float32 to ``whole`` ``[B, 2, C]``. One program per
    sample and block of BC channels.
    """
    blocks: tl.constexpr = (C + BC - 1) // BC
    cells: tl.constexpr = (H // CELL) * (W // CELL)
    EVEN: tl.constexpr = (cells % BP == 0) and (C % BC == 0)
    pid = tl.program_id(0)
    sample, block = (pid // blocks).to(tl.int64), pid % blocks
    total, total_squares = tl.zeros((BP, BC), tl.float32), tl.zeros((BP, BC), tl.float32)
    for start in range(0, cells, BP):
        row, column, channel, inside = _tile(start, block, CELL, H, W, C, BP, BC)
        place = x + _offset(sample, row, column, channel, CELL, H, W, C)
        at_2 = _offset(sample, row, column, channel, CELL // 2, H // 2, W // 2, C)
        at_4 = _offset(sample, row, column, channel, CELL // 4, H // 4, W // 4, C)
        if CELL == 8:
            at_8 = _offset(sample, row, column, channel, 1, H // 8, W // 8, C)
            mean, squares = _statistics_8(
                place, mean_2, std_2, mean_4, std_4, mean_8, std_8, at_2, at_4, at_8, inside,
                LEAST, W, C, EVEN,
            )  # fmt: skip
        elif CELL == 4:
            mean, squares = _statistics_4(
                place, mean_2, std_2, mean_4, std_4, at_2, at_4, inside, LEAST, W, C, EVEN
            )
        elif CELL == 2:
            mean, squares = _statistics_2(place, mean_2, std_2, at_2, inside, LEAST, W, C, EVEN)
        else:
            mean = _read(place, inside, EVEN)
            squares = tl.zeros((BP, BC), tl.float32)
        if mean_all is not None:
            if cells > BP:
                before = start // BP * 1.0  # cells that each row has processed
                share = 1.0 / (before + 1.0)
                difference = mean - total
                mean = total + difference * share
                squares += total_squares + difference * (CELL * CELL * before * share) * difference
            if cells > BP and not EVEN:
                mean, squares = tl.where(inside, mean, total), tl.where(inside, squares, total_squares)
            total, total_squares = mean, squares
    if mean_all is not None:
        row = tl.arange(0, BP)[:, None]
        count = tl.where(row < cells % BP, cells // BP + 1.0, cells // BP * 1.0)
        mean = tl.sum(total * count, axis=0, keep_dims=True) * (1.0 / cells)
        difference = total - mean
        squares = tl.sum(
            total_squares + difference * (CELL * CELL * count) * difference, axis=0, keep_dims=True
        )
        std = tl.sqrt(squares * (1.0 / (H * W)) + LEAST)
        # The first row of threads stores: spreading the stores over all rows would need a barrier.
        channel = (block * BC + tl.arange(0, BC))[None, :] + row * 0
        once = (row == 0) & (channel < C)
        tl.store(mean_all + sample * C + channel, mean.to(mean_all.dtype.element_ty), mask=once)
        tl.store(std_all + sample * C + channel, std.to(std_all.dtype.element_ty), mask=once)
        if whole is not None:
            tl.store(whole + sample * (2 * C) + channel, mean, mask=once)
            tl.store(whole + sample * (2 * C) + C + channel, (1.0 / (H * W)) / std, mask=once)


@triton.jit
def _load_gradient(pointer, at, inside, EVEN: tl.constexpr):
    """Load a gradient, 0 if there is none."""
    if pointer is None:
        return 0.0
    else:  # without else, the load would be compiled in any case
        return _read(pointer + at, inside, EVEN)


@triton.jit
def _load_four(pointer, at, inside, W: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr):
    a, b = _load_gradient(pointer, at, inside, EVEN), _load_gradient(pointer, at + C, inside, EVEN)
    c, d = (
        _load_gradient(pointer, at + W * C, inside, EVEN),
        _load_gradient(pointer, at + (W + 1) * C, inside, EVEN),
    )
    return a, b, c, d


@triton.jit
def _pass_down(
    base, slope, above, mean, squares, grad_mean, grad_std, COUNT: tl.constexpr, LEAST: tl.constexpr
):
    """Express ``base + slope · (x − above)`` around the mean of this patch and add its own terms."""
    inverse = tl.rsqrt(squares * (1.0 / COUNT) + LEAST)
    base += slope * (mean - above) + grad_mean * (1.0 / COUNT)
    return base, slope + grad_std * (1.0 / COUNT) * inverse


@triton.jit
def _gradient_2(
    four, grads, base, slope, above, grad_mean, grad_std, out, inside,
    LEAST: tl.constexpr, W: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    a, b, c, d, mean, squares = four
    base, slope = _pass_down(base, slope, above, mean, squares, grad_mean, grad_std, 4, LEAST)
    _write(out, grads[0] + base + slope * a, inside, EVEN)
    _write(out + C, grads[1] + base + slope * b, inside, EVEN)
    _write(out + W * C, grads[2] + base + slope * c, inside, EVEN)
    _write(out + (W + 1) * C, grads[3] + base + slope * d, inside, EVEN)


@triton.jit
def _gradient_4(
    x, base, slope, above, grad, grad_mean_2, grad_std_2, grad_mean_4, grad_std_4, out,
    at, at_2, at_4, inside,
    LEAST: tl.constexpr, W: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # Loads run two patches ahead: more would not fit 128 registers.
    right: tl.constexpr = 2 * C
    down: tl.constexpr = 2 * W * C
    a, b = _four(x + at, inside, W, C, EVEN), _four(x + at + right, inside, W, C, EVEN)
    c, d = _four(x + at + down, inside, W, C, EVEN), _four(x + at + down + right, inside, W, C, EVEN)
    grad_mean = _load_gradient(grad_mean_4, at_4, inside, EVEN)
    grad_std = _load_gradient(grad_std_4, at_4, inside, EVEN)
    grad_means = _load_four(grad_mean_2, at_2, inside, W // 2, C, EVEN)
    grad_stds = _load_four(grad_std_2, at_2, inside, W // 2, C, EVEN)
    grad_a = _load_four(grad, at, inside, W, C, EVEN)
    grad_b = _load_four(grad, at + right, inside, W, C, EVEN)
    mean, squares = _union(a[4], a[5], b[4], b[5], c[4], c[5], d[4], d[5], 4)
    base, slope = _pass_down(base, slope, above, mean, squares, grad_mean, grad_std, 16, LEAST)
    out += at
    _gradient_2(a, grad_a, base, slope, mean, grad_means[0], grad_stds[0], out, inside, LEAST, W, C, EVEN)
    grad_c = _load_four(grad, at + down, inside, W, C, EVEN)
    _gradient_2(
        b, grad_b, base, slope, mean, grad_means[1], grad_stds[1], out + right, inside, LEAST, W, C, EVEN
    )
    grad_d = _load_four(grad, at + down + right, inside, W, C, EVEN)
    _gradient_2(
        c, grad_c, base, slope, mean, grad_means[2], grad_stds[2], out + down, inside, LEAST, W, C, EVEN
    )
    _gradient_2(
        d, grad_d, base, slope, mean, grad_means[3], grad_stds[3], out + down + right, inside,
        LEAST, W, C, EVEN,
    )  # fmt: skip


@triton.jit
def gradient_kernel(
    x, whole, grad, grad_mean_2, grad_std_2, grad_mean_4, grad_std_4, grad_mean_8, grad_std_8,
    grad_mean_all, grad_std_all, out,
    LEAST: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CELL: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the map, given those of its vectors and statistics that are not None. One program
    per sample, block of BP cells and block of BC channels.
    """
    blocks: tl.constexpr = (C + BC - 1) // BC
    cells: tl.constexpr = (H // CELL) * (W // CELL)
    parts: tl.constexpr = (cells + BP - 1) // BP
    EVEN: tl.constexpr = (cells % BP == 0) and (C % BC == 0)
    pid = tl.program_id(0)
    sample, block, part = (pid // (blocks * parts)).to(tl.int64), pid % blocks, pid // blocks % parts
    row, column, channel, inside = _tile(part * BP, block, CELL, H, W, C, BP, BC)
    at = _offset(sample, row, column, channel, CELL, H, W, C)
    at_2 = _offset(sample, row, column, channel, CELL // 2, H // 2, W // 2, C)
    at_4 = _offset(sample, row, column, channel, CELL // 4, H // 4, W // 4, C)
    # Each row of threads loads these values: sharing them would need a barrier.
    at_all = _offset(sample, row, column, channel, 0, 1, 1, C)
    mean_gradient = _load_gradient(grad_mean_all, at_all, inside, EVEN) * (1.0 / (H * W))
    base = tl.zeros((BP, BC), tl.float32) + mean_gradient
    slope, mean = tl.zeros_like(base), tl.zeros_like(base)
    if grad_std_all is not None:
        place = whole + sample * C + at_all
        mean = _read(place, inside, EVEN)
        slope = _read(place + C, inside, EVEN) * _read(grad_std_all + at_all, inside, EVEN)
    if CELL == 8:
        at_8 = _offset(sample, row, column, channel, 1, H // 8, W // 8, C)
        right: tl.constexpr = 4 * C
        down: tl.constexpr = 4 * W * C
        a, aa = _statistics_4(x + at, None, None, None, None, at_2, at_4, inside, LEAST, W, C, EVEN)
        b, bb = _statistics_4(x + at + right, None, None, None, None, at_2, at_4, inside, LEAST, W, C, EVEN)
        c, cc = _statistics_4(x + at + down, None, None, None, None, at_2, at_4, inside, LEAST, W, C, EVEN)
        d, dd = _statistics_4(
            x + at + down + right, None, None, None, None, at_2, at_4, inside, LEAST, W, C, EVEN
        )
        grad_mean = _load_gradient(grad_mean_8, at_8, inside, EVEN)
        grad_std = _load_gradient(grad_std_8, at_8, inside, EVEN)
        above = mean
        mean, squares = _union(a, aa, b, bb, c, cc, d, dd, 16)
        base, slope = _pass_down(base, slope, above, mean, squares, grad_mean, grad_std, 64, LEAST)
        for quarter in tl.static_range(4):
            _gradient_4(
                x, base, slope, mean, grad, grad_mean_2, grad_std_2, grad_mean_4, grad_std_4, out,
                at + quarter // 2 * down + quarter % 2 * right,
                at_2 + (quarter // 2 * W + quarter % 2 * 2) * C,
                at_4 + (quarter // 2 * (W // 4) + quarter % 2) * C,
                inside, LEAST, W, C, EVEN,
            )  # fmt: skip
    elif CELL == 4:
        _gradient_4(
            x, base, slope, mean, grad, grad_mean_2, grad_std_2, grad_mean_4, grad_std_4, out,
            at, at_2, at_4, inside, LEAST, W, C, EVEN,
        )  # fmt: skip
    elif CELL == 2:
        four, grads = _four(x + at, inside, W, C, EVEN), _load_four(grad, at, inside, W, C, EVEN)
        grad_mean = _load_gradient(grad_mean_2, at_2, inside, EVEN)
        grad_std = _load_gradient(grad_std_2, at_2, inside, EVEN)
        _gradient_2(four, grads, base, slope, mean, grad_mean, grad_std, out + at, inside, LEAST, W, C, EVEN)
    else:
        gradient = (
            base + slope * (_read(x + at, inside, EVEN) - mean) + _load_gradient(grad, at, inside, EVEN)
        )
        _write(out + at, gradient, inside, EVEN)
