"""Building blocks of the numba kernels: compiling, and what needs LLVM's own instructions.

Rows of `head_dim` floats are handled in vectors as wide as LLVM likes: it cuts them to
those of the CPU. Loops would not do: it does not vectorise them where arrays might overlap.
The order of sums is fixed here, so that no CPU and no compiler changes it.

A tuple's length is part of its type: `lanes` is a tuple whose length is head_dim / LANES.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LANES = 8
"""head_dim must be a multiple of it."""

BLOCK = 8
"""Rows that are multiplied together; a power of two."""

I32, I64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_CONTRACT = ("contract",)
"""A product and a sum may be one instruction."""


def stamp(folder: Path) -> bytes:
    """Return a hash of all that numba kernels in a folder are made of."""
    sources = [*folder.glob("*_cpu.py")]
    sources.append(folder / "group_layout.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).digest()


_STAMP = stamp(Path(__file__).parent)


def compiled(**options: Any) -> Callable[[Any], Any]:
    """`njit`, with the machine code kept on disk where there is a place for it.

    What is called from Python needs `no_cpython_wrapper=False`: the others compile faster.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True} | options

    def wrap(function: Any) -> Any:
        try:
            dispatcher = njit(cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # neither the package nor the user has a writable directory
            return njit(error_model="numpy", **options)(function)
        # numba would look for changes in the function's own file, not in what it calls.
        dispatcher._cache._cache_file._source_stamp = _STAMP
        return dispatcher

    return wrap


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(_: Any, x: Any) -> Any:  # noqa: ARG001
    """The bits of a float32 as int32."""
    return types.int32(types.float32), lambda _c, b, _s, args: b.bitcast(args[0], I32)


@intrinsic  # type: ignore[untyped-decorator]
def from_bits(_: Any, x: Any) -> Any:  # noqa: ARG001
    """The float32 that has the bits of an int32."""
    return types.float32(types.int32), lambda _c, b, _s, args: b.bitcast(args[0], FLOAT)


@intrinsic  # type: ignore[untyped-decorator]
def take(_: Any, counter: Any) -> Any:
    """Return counter[0] and add 1 to it, atomically."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, I64(1), "monotonic")

    return types.int64(counter), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, array: Any, index: Any) -> Any:  # noqa: ARG001
    """Fetch the cache line of array.flat[index] into the L2 cache; any index is harmless."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), I32, I32, I32])
        name = "llvm.prefetch.p0i8"
        fetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        at = address(context, builder, (signature.args[0], args[0]), args[1], byte)
        builder.call(fetch, [at, I32(0), I32(2), I32(1)])  # read, L2, data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def address(context: Any, builder: Any, array: tuple[Any, Any], index: Any, kind: ir.Type) -> Any:
    """Return the address of array.flat[index] for data of a kind; array: (type, value)."""
    data = context.make_array(array[0])(context, builder, array[1]).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def vector(kind: ir.Type, count: int) -> ir.Type:
    """Return the type of so many numbers of a kind."""
    return ir.VectorType(kind, count)


def picked(builder: Any, x: Any, places: Sequence[int], y: Any = None) -> Any:
    """Return the elements of vector x, or of x and y, at constant places."""
    index = ir.Constant(vector(I32, len(places)), list(places))
    return builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined) if y is None else y, index)


def fused(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """Return total + x · y."""
    return builder.fadd(total, builder.fmul(x, y, flags=_CONTRACT), flags=_CONTRACT)


def _load(builder: Any, pointer: Any, at: int, count: int) -> Any:
    """Load so many floats from a pointer to floats."""
    place = builder.gep(pointer, [I64(at)])
    return builder.load(builder.bitcast(place, vector(FLOAT, count).as_pointer()), align=4)


def _folded(builder: Any, x: Any, count: int) -> Any:
    """Add the upper half of a vector to the lower until so many elements are left."""
    while x.type.count > count:
        half = x.type.count // 2
        upper = picked(builder, x, range(half, 2 * half))
        x = builder.fadd(picked(builder, x, range(half)), upper)
    return x


def _summed(builder: Any, sums: list[Any]) -> Any:
    """Return the sum of each of n vectors of n elements, as one vector."""
    count = len(sums)
    while len(sums) > 1:
        sums = [
            builder.fadd(
                picked(builder, x, range(0, 2 * count, 2), y),
                picked(builder, x, range(1, 2 * count, 2), y),
            )
            for x, y in zip(sums[::2], sums[1::2], strict=True)
        ]
    return sums[0]


def _dots(rows: int) -> Any:
    """Return an intrinsic for so many rows at once."""

    @intrinsic
    def dots(_, q, q_at, keys, at, out, to, lanes):  # type: ignore[no-untyped-def]  # noqa: ARG001
        """out.flat[to + j] = the dot product of q.flat[q_at:] and keys.flat[at + j · D:]."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            arrays = list(zip(signature.args, args, strict=True))
            dim = signature.args[6].count * LANES
            width = LANES * (2 if dim % (2 * LANES) == 0 else 1)
            query = address(context, builder, arrays[0], args[1], FLOAT)
            key = address(context, builder, arrays[2], args[3], FLOAT)
            parts = [_load(builder, query, d, width) for d in range(0, dim, width)]
            sums = []
            for j in range(rows):
                total = builder.fmul(parts[0], _load(builder, key, j * dim, width))
                for i, part in enumerate(parts[1:], 1):
                    row = _load(builder, key, j * dim + i * width, width)
                    total = fused(builder, total, part, row)
                sums.append(_folded(builder, total, rows))
            result = _summed(builder, sums)
            where = address(context, builder, arrays[4], args[5], result.type)
            builder.store(result, where, align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(q, i64, keys, i64, out, i64, lanes), generate

    return dots


def _sums(rows: int) -> Any:
    """Return an intrinsic for so many rows at once."""

    @intrinsic
    def sums(_, weights, weights_at, values, at, acc, to, lanes):  # type: ignore[no-untyped-def]  # noqa: ARG001
        """acc.flat[to:] += Σ_j weights.flat[weights_at + j] · values.flat[at + j · D:]."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            arrays = list(zip(signature.args, args, strict=True))
            dim = signature.args[6].count * LANES
            weight = address(context, builder, arrays[0], args[1], FLOAT)
            value = address(context, builder, arrays[2], args[3], FLOAT)
            where = address(context, builder, arrays[4], args[5], vector(FLOAT, dim))
            total = builder.load(where, align=4)
            for j in range(rows):
                factor = picked(builder, _load(builder, weight, j, 1), [0] * dim)
                total = fused(builder, total, factor, _load(builder, value, j * dim, dim))
            builder.store(total, where, align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(weights, i64, values, i64, acc, i64, lanes), generate

    return sums


dot_block, dot_one = _dots(BLOCK), _dots(1)
add_block, add_one = _sums(BLOCK), _sums(1)
