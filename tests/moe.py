"""A Mixture-of-Experts layer after Mixtral: 8 experts, the best 2 for each token, a fixed capacity an expert."""

import torch
from torch import nn
from torch.nn.functional import silu


class MixtureOfExperts(nn.Module):
    """Tokens [T, hidden] -> [T, hidden]; what exceeds an expert's capacity is dropped."""

    def __init__(self, hidden, inner, experts=8, top=2, capacity=6):
        super().__init__()
        self.experts, self.top, self.capacity = experts, top, capacity
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def slots(self, tokens):
        """Place of every (token, choice) in the experts' buffer, the last row for what is dropped, and its weight."""
        weight, expert = torch.topk(self.router(tokens).softmax(-1), self.top, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        chosen = (expert.reshape(-1, 1) == torch.arange(self.experts, device=tokens.device)).to(tokens.dtype)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1).long()
        slot = expert.reshape(-1) * self.capacity + place
        return torch.where(place < self.capacity, slot, self.experts * self.capacity), weight.reshape(-1, 1)

    def forward(self, tokens):
        slot, weight = self.slots(tokens)
        token = torch.arange(slot.shape[0], device=tokens.device) // self.top
        rows = self.experts * self.capacity
        buffer = tokens.new_zeros(rows + 1, tokens.shape[1])
        buffer.index_add_(0, slot, tokens.index_select(0, token))
        inside = buffer[:-1].reshape(self.experts, self.capacity, -1)
        outside = torch.bmm(silu(torch.bmm(inside, self.up)), self.down).reshape(rows, -1)
        outside = torch.cat([outside, outside.new_zeros(1, tokens.shape[1])])
        combined = torch.zeros_like(tokens)
        return combined.index_add_(0, token, outside.index_select(0, slot) * weight)
