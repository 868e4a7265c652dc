"""The online softmax of attention kernels in Triton, to the base 2, whose logarithm `SCALE` has in it."""

import triton
import triton.language as tl


@triton.jit
def weights(scores, most, SCALE: tl.constexpr, WHOLE: tl.constexpr):
    """What a block of scores weighs beside what came before.

    Arguments:
    - `scores`: of a block of keys; minus infinity where a row does not see one, which none has where `WHOLE`.
    - `most`: the largest scaled score of each row so far.

    Returns the weights of the block, the factor of all before, and `most` with the block.
    """
    new_most = tl.maximum(most, tl.max(scores, 1) * SCALE)
    finite = new_most
    if not WHOLE:
        finite = tl.where(new_most == float("-inf"), 0.0, new_most)
    p = tl.exp2(scores * SCALE - finite[:, None])
    decay = tl.exp2(most - finite)
    return p, decay, new_most
