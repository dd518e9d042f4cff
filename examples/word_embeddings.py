"""Word embeddings from the English text that ships with Python: guess a word from the three words on either side of it.

What this shows of the project is one line, the backward pass of `nn.Embedding`: frequent words occur many times in a batch, and
the gradient of such a word's row is the sum over all its occurrences. Model and training loop are plain PyTorch and know nothing
of the project; `compare_gradient` is the check, with its tolerance derived there. Sizes may be changed.
"""

import collections
import dataclasses
import pydoc_data.topics
import re

import torch

CONTEXT = (-3, -2, -1, 1, 2, 3)
COLUMNS = 64
BATCH = 256

# Unit roundoff of float32: the largest relative error of one rounded addition.
UNIT_ROUNDOFF = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Text:
    """words: the vocabulary, most frequent first. tokens: [T] int64, the text as numbers into it."""

    words: list
    tokens: torch.Tensor


@dataclasses.dataclass
class Training:
    """What one training run did, a list element a step.

    losses: cross-entropy in nats. repeated: tokens of the batch whose word had occurred in it before.
    differences: largest |gradient - gradient on the CPU| of the embedding table, and shares: the largest share of its tolerance
    that any element used; both empty where nothing was compared.
    """

    losses: list = dataclasses.field(default_factory=list)
    repeated: list = dataclasses.field(default_factory=list)
    differences: list = dataclasses.field(default_factory=list)
    shares: list = dataclasses.field(default_factory=list)


def read_text():
    """The help topics of the Python language, lower case, punctuation left out."""
    words = re.findall(r"[a-z]+(?:'[a-z]+)?", " ".join(pydoc_data.topics.topics.values()).lower())
    vocabulary = [word for word, _ in collections.Counter(words).most_common()]
    number = {word: position for position, word in enumerate(vocabulary)}
    return Text(vocabulary, torch.tensor([number[word] for word in words]))


class WordGuesser(torch.nn.Module):
    """Mean of the context words' embeddings, then one linear layer over the vocabulary."""

    def __init__(self, vocabulary_size):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary_size, COLUMNS)
        self.output = torch.nn.Linear(COLUMNS, vocabulary_size)

    def forward(self, context):
        """context: [B, 6] int64. Returns the context's embeddings [B, 6, D] and the logits [B, vocabulary]."""
        rows = self.embedding(context)
        return rows, self.output(rows.mean(dim=1))


def train(text, device, steps, compare=False):
    """Train a new model for `steps` steps, a generator: yields the Training so far after each.

    Args:
        text: Text.
        device: where model and batches live. Seeds are fixed, so that each run sees the same weights and batches.
        steps (int): batches of 256 words, with 6 context words each.
        compare (bool): check each step's embedding gradient against the CPU, see `compare_gradient`.
    """
    torch.manual_seed(0)
    model = WordGuesser(len(text.words)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    batches = torch.Generator().manual_seed(1)
    offsets = torch.tensor(CONTEXT)
    training = Training()
    for _ in range(steps):
        positions = torch.randint(3, len(text.tokens) - 3, (BATCH,), generator=batches)
        context, word = text.tokens[positions.unsqueeze(1) + offsets], text.tokens[positions]
        rows, logits = model(context.to(device))
        rows.retain_grad()
        loss = torch.nn.functional.cross_entropy(logits, word.to(device))
        optimizer.zero_grad()
        loss.backward()
        training.losses.append(loss.item())
        training.repeated.append(context.numel() - context.unique().numel())
        if compare:
            difference, share = compare_gradient(context, rows.grad, model.embedding.weight.grad)
            training.differences.append(difference)
            training.shares.append(share)
        optimizer.step()
        yield training


def compare_gradient(context, rows_gradient, weight_gradient):
    """Compare an embedding table's gradient with the one that torch computes on the CPU from the same incoming gradient.

    A row that n tokens share is a sum of n float32 numbers. In whatever order they are added, it is off from the exact sum by at
    most g = (n-1)u / (1 - (n-1)u) times the sum of their magnitudes, u = 2**-24 (Higham, "Accuracy and Stability of Numerical
    Algorithms", section 4.2). Two orders differ by at most twice that; a row with one token has to be equal.

    Args:
        context: [...] int64 on the CPU. rows_gradient: [..., D] float32, the gradient of the looked-up rows.
        weight_gradient: [N, D] float32, to check.

    Returns:
        (float, float): the largest difference, and the largest share of its tolerance that an element uses: above 1 (or not a
        number) where they disagree.
    """
    index, weight_gradient = context.reshape(-1), weight_gradient.cpu()
    rows_gradient = rows_gradient.cpu().reshape(index.numel(), -1)
    reference = torch.ops.aten.embedding_dense_backward(rows_gradient, index, len(weight_gradient), -1, False)
    additions = (index.bincount(minlength=len(weight_gradient)) - 1).clamp(min=0).double() * UNIT_ROUNDOFF
    magnitude = torch.zeros(weight_gradient.shape, dtype=torch.float64).index_add_(
        0, index, rows_gradient.abs().double()
    )
    tolerance = 2 * (additions / (1 - additions)).unsqueeze(1) * magnitude
    difference = (weight_gradient.double() - reference.double()).abs()
    share = torch.where(difference == 0, 0.0, difference / tolerance)
    return float(difference.max()), float(share.max())
