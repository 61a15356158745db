"""Compiles the Triton kernels for A100- and H100-class GPUs without a GPU. Run by tests/gpu/test_kernels_triton.py.

The interpreter takes much that the compiler refuses. What bit-equality on a GPU rests upon is checked in the assembly: no
multiply-add, divisions and roots that round to nearest. A number of elements is never multiplied in 32 bits. And what speed
rests upon: no register is spilled, and long arrays of floats are read and written 16 bytes at a time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from birder.kernels import cuda, cuda_many
from birder.kernels.cuda import WARPS
from birder.kernels.cuda_bits import BYTES

F, U, D, I32, I64, R, ROWS = "*fp32", "*u8", "*fp64", "i32", "i64", "fp32", "*i64"
TILE, WORDS = {"BYTES": BYTES}, {"WORDS": 256}
MASKED, LONG = {"MASKED": True}, {"ORDERED": True, "ALIGNED": True}
PERMUTED = {"ORDERED": False, "ALIGNED": True}
COUNTER = [I32, I32, I32, I32, I64]
LAW = [R] * 6
"""beta, 1 - beta, the same of the second, scale, eps."""
FORM = [R] * 5
"""weight, what a number of the error stands for, the largest number, numbers in 1.0, the dither."""
MOVING = {"MOMENTS": True, "HOLD": True, "SHARED": True, "FEEDBACK": True, "STEPS": False, "BYTES": BYTES}
EVEN = 16
"""Arrays begin at multiples of so many bytes, and numbers of elements and bytes are multiples of it, as in real units."""


class Case(NamedTuple):
    """wide: accesses of 16 bytes that there are at least, loads and stores."""

    kernel: object
    types: list[str]
    constants: dict[str, object]
    wide: tuple[int, int] = (0, 0)
    warps: int = 4


CASES = [
    Case(cuda._encode, [F, F, F, U, I64, *LAW, I32, *COUNTER], {"HOLD": True, **TILE}, (3, 2)),
    Case(cuda._encode, ["*bf16", F, F, U, I32, *LAW, I32, *COUNTER], {"HOLD": False, **TILE}, (2, 2)),
    Case(cuda._encode, ["*fp16", F, F, U, I32, *LAW, I32, *COUNTER], {"HOLD": False, **TILE}, (2, 2)),
    Case(cuda._reduce, [U, U, I32, I32, I32, *COUNTER], TILE),
    Case(cuda._copied, ["*i32", "*i32", I32, I32, *COUNTER], {"LEVELS": 4, "WORDS": cuda.SELECTED}),
    Case(cuda._unseen, [F, U, U, I32, I32], {"WIDTH": 1024}, (1, 0)),
    Case(cuda_many._apply, [ROWS, U, U, R, R], {"DECAYS": True, "PARTIAL": True, **LONG}, (1, 1)),
    Case(cuda_many._apply, [ROWS, U, U, R, R], {"DECAYS": True, "PARTIAL": True, **PERMUTED}, (1, 1)),
    Case(cuda_many._move, [ROWS, R, R, R, R], LONG, (3, 1)),
    Case(cuda_many._move, [ROWS, R, R, R, R], PERMUTED, (1, 1)),
    Case(cuda_many._take, [ROWS, F, F], {"KIND": tl.float32, "SCALED": True, "SCREENED": True, **LONG}, (1, 1)),
    Case(cuda_many._take, [ROWS, F, F], {"KIND": tl.bfloat16, "SCALED": False, "SCREENED": True, **LONG}, (0, 1)),
    Case(cuda_many._take, [ROWS, F, F], {"KIND": tl.float16, "SCALED": False, "SCREENED": True, **PERMUTED}),
    Case(cuda._binarize, [F, U, I32, I32, *COUNTER], TILE, (1, 0)),
    Case(cuda._mask, [U, I64, I32, *COUNTER], TILE),
    Case(cuda._blocks, ["*i64", I32, I32, *COUNTER], WORDS),
    Case(cuda._owned, ["*i32", "*i32", I32, I32, I32, *COUNTER], WORDS),
    Case(cuda._assemble, ["*i32", "*i32", I32, I32, I32, *COUNTER], WORDS),
    Case(cuda._tree, [D, D, I32], {}, warps=WARPS),
    Case(cuda._add_message, [F, F, U, D, I64], MASKED, (2, 1), WARPS),
    Case(cuda._add_momentum, [F, F, F, U, D, I32, R, R], MASKED, (3, 1), WARPS),
    Case(cuda._add_average, [F, U, F, U, D, I32, I32, I32], MASKED, (1, 1), WARPS),
    Case(cuda._average_signs, [F, U, F, I32, I32], {}, (0, 1)),
    Case(cuda._pack_signs, [F, U, I64], TILE, (1, 0)),
    Case(cuda._split_signs, [F, F, U, U, F, I32, I32], {**MASKED, **TILE}, (1, 1)),
    Case(cuda._write_signs, [F, U, F, U, I32, I32], {**MASKED, **TILE}, (0, 1)),
    Case(cuda._modulate, [F, F, U, I64, *FORM], {"FEEDBACK": True, "STEPS": False, **TILE}, (2, 1)),
    Case(cuda._modulate, [F, "*i8", U, I32, *FORM], {"FEEDBACK": False, "STEPS": True, **TILE}, (1, 0)),
    Case(cuda._modulate_adam, [*[F] * 5, U, I64, *LAW, *FORM], MOVING, (5, 3)),
    Case(cuda._modulate_adam, ["*bf16", *[F] * 3, "*i8", U, I32, *LAW, *FORM], MOVING | {"STEPS": True}, (3, 2)),
    Case(cuda._modulate_adam, [*[F] * 5, U, I32, *LAW, *FORM], MOVING | {"MOMENTS": False}, (3, 1)),
    Case(cuda._serve, [U, F, U, I32, I32, *FORM], {"STEPS": False, **TILE}, (1, 1)),
    Case(cuda._serve, [U, "*i8", U, I32, I32, *FORM], {"STEPS": True, **TILE}),
]


def ptxas(capability: int) -> str:
    """The assembler with which Triton would compile for that GPU."""
    name = "ptxas" if capability < 90 else "ptxas-blackwell"
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(folder / name if (folder / name).exists() else folder / "ptxas")


def spilled(assembly: str, capability: int) -> int:
    """Bytes of registers that the assembler stores to memory and loads from it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(assembly)
        arch = re.search(r"\.target (\w+)", assembly).group(1)
        command = [ptxas(capability), "-v", f"--gpu-name={arch}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        said = subprocess.run(command, capture_output=True, text=True).stderr
    counts = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert counts, said
    return sum(map(int, counts))


def check(case: Case, capability: int) -> str:
    """Compiles one kernel. Returns what is said of it; raises AssertionError where it is not as it should be."""
    kernel = case.kernel
    runtime = iter(case.types)
    signature = {name: "constexpr" if name in case.constants else next(runtime) for name in kernel.arg_names}
    assert next(runtime, None) is None, kernel.__name__
    values = {(kernel.arg_names.index(name),): value for name, value in case.constants.items()}
    even = [
        i
        for i, p in enumerate(kernel.params)
        if p.name in ("numel", "count", "block") or signature[p.name].startswith("*")
    ]
    attributes = {(i,): [["tt.divisibility", EVEN]] for i in even if not kernel.params[i].do_not_specialize}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"enable_fp_fusion": False, "num_warps": case.warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    assembly, name = compiled["ptx"], f"{kernel.__name__} {case.constants}"
    # Of a number of bytes or words that fits into 32 bits the number of elements need not.
    assert not re.search(r"muli (?:.*, )?%(?:count|numel|words)\b.*: i32", compiled["ttir"]), name
    assert not re.search(r"\bfma\.", assembly), name
    assert ".ftz" not in assembly, name  # numbers below 1e-38 are not 0
    assert set(re.findall(r"\bdiv\.[\w.]*f32", assembly)) <= {"div.rn.f32"}, name
    assert set(re.findall(r"\bsqrt\.[\w.]*f32", assembly)) <= {"sqrt.rn.f32"}, name
    # 4 words of 32 bits or 2 of 64: 16 bytes.
    wide = [len(re.findall(rf"\b{op}\.global[\w.:]*\.(?:v4\.[buf]32|v2\.[buf]64)", assembly)) for op in ("ld", "st")]
    spills = spilled(assembly, capability)
    said = f"sm_{capability} {name}: {wide[0]} loads and {wide[1]} stores of 16 bytes, {spills} bytes spilled"
    assert spills == 0, said
    assert wide[0] >= case.wide[0], said
    assert wide[1] >= case.wide[1], said
    return said


if __name__ == "__main__":
    bad = 0
    for capability in (80, 90):
        for case in CASES:
            try:
                print(check(case, capability), flush=True)
            except AssertionError as wrong:
                bad += 1
                print("WRONG", wrong, flush=True)
    sys.exit(bad > 0)
