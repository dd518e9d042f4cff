"""What the backend turns operators into before it lowers them, as far as rows are accumulated.

After the description of TorchNeuron's compile path: index_add becomes index_put with accumulate, the backward of an embedding
becomes a one-hot matrix of [K, N] times a dense one. Both are right and slow, which is what routing spares a graph.
"""

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten


def _embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    index = indices.reshape(-1).long()
    rows = grad_output.reshape(index.numel(), -1)
    one_hot = torch.nn.functional.one_hot(index, num_weights).to(rows.dtype)
    if scale_grad_by_freq:
        rows = rows / one_hot.sum(0)[index].unsqueeze(-1)
    if padding_idx >= 0:
        rows = rows * (index != padding_idx).unsqueeze(-1).to(rows.dtype)
    return one_hot.t() @ rows


def table():
    """Operator -> decomposition, for aot_autograd."""
    return {
        **get_decompositions([aten.index_add, aten.index_add_, aten._unsafe_index, aten._unsafe_index_put]),
        aten.embedding_dense_backward.default: _embedding_dense_backward,
    }
