"""A layer of experts, two for each token, added with the weights of a router."""

import torch
from task import input_t, output_t
from utils import make_match_reference


def generate_input(tokens: int, experts: int, width: int, out: int, seed: int) -> input_t:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    weights = {f"expert{i}": draw(out, width) for i in range(experts)}
    probability, chosen = draw(tokens, experts).softmax(1).topk(2)
    return draw(tokens, width), weights, {"top_k": 2, "experts": experts}, chosen.int(), probability


def ref_kernel(data: input_t) -> output_t:
    x, weights, config, chosen, probability = data
    stacked = torch.stack([weights[f"expert{i}"] for i in range(config["experts"])]).double()
    each = torch.einsum("tw,tkow->tko", x.double(), stacked[chosen.long()])
    return (each * probability.double()[..., None]).sum(1).float()


check_implementation = make_match_reference(ref_kernel, rtol=1e-4, atol=1e-4)
