"""Tiny models, batches and losses that the tests of training share."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from gemproj.torch.losses import CrossEntropy, Distillation


def perceptron(dtype=torch.float64, seed=0):
    """Make a network of 6 inputs, 8 hidden units and 3 classes, the same every time."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def task(seed, n=12, dtype=torch.float64):
    """Draw a batch of a task: points, labelled by the largest of their first three coordinates."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), x[:, :3].argmax(1)


def rival(batch, shift=1):
    """Give the same points other labels: learning them raises the loss of the batch."""
    return batch[0], (batch[1] + shift) % 3


def labels(batch):
    """Return the labels of a batch, a pair or a mapping."""
    return batch["y"] if isinstance(batch, dict) else batch[1]


def logits(model, batch):
    return model(batch["x"] if isinstance(batch, dict) else batch[0])


def loss(model, batch):
    """Return the mean loss of a batch."""
    return cross_entropy(logits(model, batch), labels(batch))


class Quantised(torch.Tensor):
    """A tensor without storage, like the weights and optimizer states of torchao, which few operations take."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    def dequantize(self):
        return self.held.clone()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), options=None):
        if "foreach" in str(function):
            raise NotImplementedError(f"{function} of {cls.__name__}")
        args, options = tree_map(lambda a: a.held if isinstance(a, cls) else a, (args, options or {}))
        found = function(*args, **options)
        return cls(found) if function is torch.ops.aten.detach.default else found


EACH = CrossEntropy(logits, labels=labels)
SAID = Distillation(logits)
# Right after outputs were stored, the gradient of a divergence alone is rounding.
BOTH = Distillation(logits, labels=EACH, weight=0.1)


def tokenizer(words, side="right"):
    """Make a tokenizer of these words, which are told apart by spaces."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    vocabulary = {word: k for k, word in enumerate(["<pad>", "<end>", *words])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<pad>", "padding_side": side}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SIZES |= {"max_position_embeddings": 16}
GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}


def language_model(kind="llama", seed=0, **changes):
    """Make a tiny model of transformers, the same every time."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    special = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    sizes = GPT2 if kind == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(kind, **(special | sizes | changes))
    heads = transformers.AutoModelForSeq2SeqLM if kind == "bart" else transformers.AutoModelForCausalLM
    return heads.from_config(config)


def adapted(model, **options):
    """Add low-rank adapters, which are not zero, to a model."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options))
