"""The least a Gated DeltaNet layer must move: bytes of one layer, forward and backward.

Every operator reads its inputs and writes its results once; in between nothing touches memory.
Per token, with C = 2 Hk Dk + Hv Dv channels (q, k, v), Y = Hv Dv, e bytes an element, log decays g
and their gradient in fp32:

    conv   forward   read x, write q k v                              2 C e
    conv   backward  read x, d(q k v), write dx                       3 C e
    gates  forward   read alpha, b, write g, beta                     (3 e + 4) Hv
    gates  backward  read alpha, b, dg, dbeta, write dalpha, db       (5 e + 4) Hv
    rule   forward   read q k v, g, beta, write y                     C e + Y e + (e + 4) Hv
    rule   backward  read q k v, g, beta, dy, write their gradients   2 C e + Y e + 2 (e + 4) Hv

Left out is what an implementation may keep on chip or compute again: states between chunks,
normalised keys, the solved blocks, w and u. Weights do not grow with tokens and are left out too.
So no layer reaches the bound; it says how far memory alone would let it go.
"""

from __future__ import annotations

from .gdn_layer import GdnShape

H200_TB_PER_S = 4.8
"""Peak bandwidth of an H200's memory."""


def bytes_per_token(shape: GdnShape) -> dict[str, int]:
    """Bytes of one token by operator: ``conv``, ``gates``, ``rule``."""
    element, heads = shape.dtype.itemsize, shape.value_heads
    channels, values = shape.channels, heads * shape.value_dim
    gates = element + 4
    return {
        "conv": 5 * channels * element,
        "gates": (8 * element + 8) * heads,
        "rule": 3 * channels * element + 2 * values * element + 3 * gates * heads,
    }


def bound_ms(shape: GdnShape, tokens: int, tb_per_s: float = H200_TB_PER_S) -> float:
    """Time to move the bytes of ``tokens`` tokens, the most that any rank holds."""
    return tokens * sum(bytes_per_token(shape).values()) / tb_per_s / 1e9
