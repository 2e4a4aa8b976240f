"""Compile T5's kernels for a card without one: `compile_kernels.py ARCH SHARED_KIB CASE…` prints their memory.

Run where TRITON_INTERPRET is not set. A line a kernel: case, kernel, shared memory of a program.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fullshard.program.speed.t5_attention import kernels
from fullshard.program.speed.t5_attention.launch import CARDS

CASES = {
    "encoder": {"HAS_BIAS": True, "HAS_SEG_Q": False, "HAS_SEG": True, "CAUSAL": False, "DROP": True, "SUMMED": True},
    "decoder": {"HAS_BIAS": True, "HAS_SEG_Q": True, "HAS_SEG": True, "CAUSAL": True, "DROP": False, "SUMMED": False},
    "cross": {"HAS_BIAS": False, "HAS_SEG_Q": False, "HAS_SEG": False, "CAUSAL": False, "DROP": True, "SUMMED": False},
}
TYPES = {"BIAS": "fp32", "LSE": "fp32", "DELTA": "fp32", "SUMS": "fp32", "BUCKET": "i32", "SEED": "i64"}
TYPES |= {"SEGMENTS_Q": "i32", "SEGMENTS_K": "i32"} | dict.fromkeys(
    ("Q", "K", "V", "OUT", "DO", "DQ", "DK", "DV"), "bf16"
)
WIDTH = 64


def compile_kernel(name, arch, blocks, flags):
    kernel = getattr(kernels, name)
    values = flags | {
        "D": WIDTH,
        "BD": WIDTH,
        "BM": blocks.queries,
        "BN": blocks.keys,
        "PRECISION": "ieee",
        "BUCKETS": 32,
    }
    signature, aligned = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        strides = argument.endswith(("_row", "_head", "_place")) and not argument.startswith("seg")
        if argument in TYPES or strides:
            aligned[(index,)] = [["tt.divisibility", 16]]
        number = "fp32" if argument in ("scale", "grow") else "i32"
        signature[argument] = f"*{TYPES[argument]}" if argument in TYPES else number
        if argument in values:
            signature[argument] = "constexpr"
    constants = {(kernel.arg_names.index(one),): value for one, value in values.items() if one in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).metadata.shared


if __name__ == "__main__":
    arch, shared, *cases = sys.argv[1:]
    table = next(found for least, found in CARDS.items() if int(shared) << 10 >= least)
    for case in cases:
        for name, sizes in table.items():
            print(case, name, compile_kernel(name, int(arch), sizes[1], CASES[case]), flush=True)
