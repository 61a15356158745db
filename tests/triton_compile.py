"""Compiles the Triton kernels for an H100-class GPU, for which no GPU is needed. Run by tests/test_kernels_triton.py.

The interpreter takes much that the compiler refuses. What bit-equality on a GPU rests upon is checked in the assembly: no
multiply-add, divisions that round to nearest.
"""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from birder.kernels import cuda, cuda_feedback
from birder.kernels.cuda_bits import BYTES

F, U, D, I32, I64, R = "*fp32", "*u8", "*fp64", "i32", "i64", "fp32"
TILE = {"BYTES": BYTES}
MASKED = {"MASKED": True}
COUNTER = [I32, I32, I32, I32, I64]
KERNELS = [
    (cuda._encode, [F, F, F, U, I64, R, R, R, *COUNTER], {"HOLD": True, **TILE}),
    (cuda._encode, ["*bf16", F, F, U, I32, R, R, R, *COUNTER], {"HOLD": False, **TILE}),
    (cuda._encode, ["*fp16", F, F, U, I32, R, R, R, *COUNTER], {"HOLD": False, **TILE}),
    (cuda._reduce, [U, U, I32, I32, *COUNTER], TILE),
    (cuda._copied, ["*i32", "*i32", I32, I32, *COUNTER], {"LEVELS": 4, "WORDS": 256}),
    (cuda._apply, [F, U, U, I64, R, R], {"DECAYS": True, "PARTIAL": True, **TILE}),
    (cuda._unseen, [F, U, U, I32, I32], {"WIDTH": 1024}),
    (cuda_feedback._tree, [D, D, I32], {}),
    (cuda_feedback._sum_squares, [F, U, D, I32], MASKED),
    (cuda_feedback._add_message, [F, F, U, D, I64], MASKED),
    (cuda_feedback._add_momentum, [F, F, F, U, D, I32, R, R], MASKED),
    (cuda_feedback._add_average, [F, U, F, U, D, I32, I32], MASKED),
    (cuda_feedback._average_signs, [F, U, F, I32, I32], {}),
    (cuda_feedback._pack_signs, [F, U, I64], TILE),
    (cuda_feedback._split_signs, [F, F, U, U, I32], {**MASKED, **TILE}),
    (cuda_feedback._write_signs, [F, U, F, U, I32], {**MASKED, **TILE}),
]

for kernel, types, constants in KERNELS:
    runtime = iter(types)
    signature = {name: "constexpr" if name in constants else next(runtime) for name in kernel.arg_names}
    assert next(runtime, None) is None, kernel.__name__
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assembly = compiled.asm["ptx"]
    assert not re.search(r"\bfma\.", assembly), kernel.__name__
    assert set(re.findall(r"\bdiv\.[\w.]*f32", assembly)) <= {"div.rn.f32"}, kernel.__name__
    print(kernel.__name__, "compiled")
