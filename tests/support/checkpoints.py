"""Packs NVFP4 weights by the publishers' formulas, with nothing of this library."""

from __future__ import annotations

import torch

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """E2M1 bytes, E4M3 scales and amax of a matrix."""
    amax = float(weight.abs().max())
    blocks = weight.unflatten(1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 * (2688 / amax)).clamp(max=448).to(torch.float8_e4m3fn)
    y = blocks / (scale.float() * (amax / 2688)).unsqueeze(-1)
    index = (y.abs().unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1) + 8 * torch.signbit(y)
    index = index.flatten(1).to(torch.uint8)
    return index[:, 0::2] | index[:, 1::2] << 4, scale, amax


def values(data: torch.Tensor, scale: torch.Tensor, amax: float) -> torch.Tensor:
    """The values that packed tensors represent."""
    codes = torch.stack((data & 15, data >> 4), -1).flatten(1).long()
    numbers = torch.tensor(E2M1 + [-value for value in E2M1])[codes]
    return (numbers.unflatten(1, (-1, 16)) * scale.float().unsqueeze(-1)).flatten(1) * (amax / 2688)


def stored(name: str, weight: torch.Tensor, convention: str, amax_of_x: float | None = 4.0) -> dict[str, torch.Tensor]:
    """The tensors of a layer without its bias, in the layout of "modelopt" or "compressed-tensors"."""
    data, scale, amax = pack(weight)
    found = {"weight_scale": scale}
    if convention == "modelopt":
        found |= {"weight": data, "weight_scale_2": torch.tensor(amax / 2688)}
        inputs = {"input_scale": torch.tensor((amax_of_x or 0) / 2688)}
    else:
        found |= {"weight_packed": data, "weight_global_scale": torch.tensor([2688 / amax])}
        inputs = {"input_global_scale": torch.tensor([2688 / (amax_of_x or 1)])}
    found |= inputs if amax_of_x is not None else {}
    return {f"{name}.{part}": x.contiguous() for part, x in found.items()}


def same_bits(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """Whether tensors have the same names, dtypes, shapes and bits."""
    alike = found.keys() == want.keys() and all(found[n].dtype is x.dtype for n, x in want.items())
    return alike and all(
        found[n].shape == x.shape and found[n].view(torch.uint8).equal(x.view(torch.uint8)) if x.ndim else found[n] == x
        for n, x in want.items()
    )
