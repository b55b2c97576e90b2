"""How one row's features are stored: float32, bfloat16, or 8 bits with an exponent per token and tap.

Owns the numbers only: encoding, decoding, and the refusal of features that carry nothing. It knows no file. An 8-bit
value is e4m3 times a power of two, so that decoding is exact in bfloat16 and in float32 alike: what a row trains does
not depend on the compute dtype it is decoded to. Called by what writes a store and by what reads it.
"""

from typing import Literal

import torch
from torch import Tensor

StoredDtype = Literal["float32", "bfloat16", "fp8"]
TORCH_DTYPES: dict[StoredDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
_FP8_MAX = 448.0  # largest finite e4m3


def bytes_per_token(num_taps: int, hidden_size: int, dtype: StoredDtype) -> int:
    """Bytes that one token's features take on disk, exponents included."""
    return num_taps * hidden_size * TORCH_DTYPES[dtype].itemsize + (num_taps if dtype == "fp8" else 0)


def encode(features: Tensor, num_taps: int, dtype: StoredDtype) -> tuple[Tensor, Tensor | None]:
    """Features as they are stored.

    Args:
        features: (n, N*D) floating.

    Returns:
        (n, N*D) values in the stored dtype, and for fp8 the (n, N) int8 exponents: value = e4m3 * 2**exponent.
    """
    if dtype != "fp8":
        return features.to(TORCH_DTYPES[dtype]), None
    x = _per_tap(features.float(), num_taps)
    # amax / 448 = mantissa * 2**exponent with a mantissa below 1: divided by that power, all values are at most 448.
    exponents = torch.frexp(x.abs().amax(2) / _FP8_MAX).exponent.clamp_(-100, 100)
    values = torch.ldexp(x, -exponents[:, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(1), exponents.to(torch.int8)


def decode(values: Tensor, exponents: Tensor | None, out: Tensor) -> None:
    """Stored features into `out` (n, N*D), on its device; without allocating where no exponents come.

    Args:
        values: (n, N*D) in a stored dtype. exponents: (n, N) int8 for fp8.
    """
    out.copy_(values, non_blocking=True)
    if exponents is not None:
        scale = torch.exp2(exponents.float()).to(out.dtype)
        _per_tap(out, exponents.shape[1]).mul_(scale[:, :, None])


def find_fault(features: Tensor, target_layer_ids: tuple[int, ...]) -> str | None:
    """What makes a row's features useless, in words: they are not finite, or a tap is the same at every position.

    Args:
        features: (n, N*D) as the target gives them.
    """
    x = _per_tap(features, len(target_layer_ids))
    finite = torch.isfinite(x.abs().amax(2)).all(0)  # (N,)
    if not bool(finite.all()):
        taps = [tap for tap, good in zip(target_layer_ids, finite.tolist(), strict=True) if not good]
        return f"tap {taps[0]} holds non-finite values"
    if len(x) > 1:
        same = (x[0] == x[-1]).all(1)
        if bool(same.any()):
            same &= (x == x[:1]).all(2).all(0)
            if bool(same.any()):
                return f"tap {target_layer_ids[int(same.nonzero()[0])]} is the same at every position"
    return None


def relative_errors(found: Tensor, wanted: Tensor, num_taps: int) -> tuple[Tensor, Tensor]:
    """Per token and tap ||found - wanted|| / ||wanted|| and the cosine between them, both (n, N) float32.

    Args:
        found, wanted: (n, N*D).
    """
    a, b = (_per_tap(x.float(), num_taps) for x in (found, wanted))
    norm = b.norm(dim=2).clamp_min(1e-30)
    return (a - b).norm(dim=2) / norm, (a * b).sum(2) / (norm * a.norm(dim=2).clamp_min(1e-30))


def _per_tap(features: Tensor, num_taps: int) -> Tensor:  # (n, N*D) -> (n, N, D), a view
    return features.view(len(features), num_taps, -1)
