"""Low-discrepancy random bits: what is added to draws that are made once, so that errors cancel over steps.

A stochastic bit of coordinate j in step t is +1 where a threshold lies below P(+1). Independent bits draw it in each
step. Here it is the Weyl sequence

    frac(h_j + t phi),        phi = (sqrt(5) - 1)/2

with h_j drawn once: as integers, of a draw of 16 bits in the upper half of a word, h_j + t PHI modulo 2^32, of which the
upper 16 bits are compared. That is the draw plus one number that all coordinates share, modulo 2^16. Since PHI is odd, a
word takes each of its 2^32 values once in 2^32 steps, and P(+1) is that of independent bits: exactly over a full period,
exactly in every single step over the draw of h_j. Over T steps the error of the count of +1 grows as log T instead of as
the root of T.

The draws are those of step 0, which no optimizer makes, and of worker 0: workers share h_j. In two phases worker i of n is
i/n ahead, and the server goes round by sqrt(2), so that (worker, server) fill the square evenly: by phi again the two
would depend on each other, and the average over steps would not be the mean of the workers.
"""

from __future__ import annotations

PHI = 0x9E3779B9
"""frac((1 + sqrt 5)/2) 2^32."""
ROOT = 0x6A09E667
"""frac(sqrt 2) 2^32."""
STEP = 0
"""The step whose draws are used in all steps."""


def turned(step: int, *, worker: int = 0, workers: int = 1, by: int = PHI) -> int:
    """How far the sequence has gone in step number `step`: what is added to draws of 16 bits, in [0, 2^16)."""
    return ((step * by + (worker << 32) // workers) & 0xFFFFFFFF) >> 16
