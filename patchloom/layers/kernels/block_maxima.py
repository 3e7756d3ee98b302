"""The largest product of each query with each block of vectors, without writing the products.

Letters: Q queries, N vectors, C channels, all padded to whole tiles; blocks of BLOCK vectors. PyTorch writes all Q·N
products and reads them again. A product of 16-bit numbers is exact in float32, in which the products are summed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, CHANNELS, VECTORS = 64, 64, 128  # vectors per block; channels per step; vectors per program


@triton.jit
def _forward(
    queries, vectors, out, N, C, tiles, blocks,
    QB: tl.constexpr, VB: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program handles VB vectors and QB queries; those with the same vectors run at the same time.
    first_query, first = tl.program_id(0) % tiles * QB, tl.program_id(0) // tiles
    query = first_query + tl.arange(0, QB)
    row = first.to(tl.int64) * VB + tl.arange(0, VB)
    products = tl.zeros((QB, VB), tl.float32)
    for begin in tl.range(0, C, CB):
        channels = begin + tl.arange(0, CB)
        of_queries = tl.load(queries + query[:, None] * C + channels[None, :])
        of_vectors = tl.load(vectors + row[:, None] * C + channels[None, :])
        products = tl.dot(of_queries, of_vectors.T, products)
    products = tl.where(row[None, :] < N, products, float("-inf"))
    largest = tl.max(tl.reshape(products, (QB, VB // BLOCK, BLOCK)), axis=2)
    block = first * (VB // BLOCK) + tl.arange(0, VB // BLOCK)
    tl.store(out + query.to(tl.int64)[:, None] * blocks + block[None, :], largest)


def block_maxima(queries: Tensor, vectors: Tensor, count: int) -> Tensor:
    """Return the largest products (Q, N / BLOCK) of queries (Q, C) with blocks of the first `count` vectors (N, C).

    C is a multiple of CHANNELS and N one of VECTORS. A block without any of these vectors has −∞.
    """
    q, c = queries.shape
    at_once = 16 if q <= 16 else 64 if q <= 64 else 128
    tiles = triton.cdiv(q, at_once)
    padded = torch.nn.functional.pad(queries, (0, 0, 0, tiles * at_once - q))
    blocks = len(vectors) // BLOCK
    out = torch.empty(len(padded), blocks, device=vectors.device)
    with torch.cuda.device_of(vectors):
        _forward[(tiles * len(vectors) // VECTORS,)](
            padded, vectors, out, count, c, tiles, blocks, at_once, VECTORS, CHANNELS, BLOCK,
            num_warps=8 if at_once == 128 else 4, num_stages=4 if at_once == 16 else 3,
        )  # fmt: skip
    return out[:q]
