"""A GPT-2 with LoRA in torch alone, with random weights: as fast as GPT-2 medium of the same shape."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the default has a LoRA gradient of 2,166,784 entries."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    words: int = 50_257
    positions: int = 1024
    classes: int = 4
    rank: int = 8


class LoRA(nn.Linear):
    """A frozen linear map plus a trained one of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.low = nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.low(x)


class Block(nn.Module):
    """Causal attention and a perceptron, with LoRA in the layers to which PEFT adds it in GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.attention, self.out = LoRA(width, 3 * width, shape.rank), LoRA(width, width, shape.rank)
        wide = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width)).requires_grad_(False)
        self.perceptron = nn.Sequential(wide, nn.GELU("tanh"), LoRA(4 * width, width, shape.rank))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.perceptron(x)


class Classifier(nn.Module):
    """Embeddings, blocks, and a head on the last token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width).requires_grad_(False)
        self.places = nn.Embedding(shape.positions, shape.width).requires_grad_(False)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width).requires_grad_(False)
        self.head = nn.Linear(shape.width, shape.classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))[:, -1])
