"""Tiny models, batches and loops that the tests of training share."""

import io
from dataclasses import fields

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from gemproj.torch import Keeper, Promise
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


def whole(tensor):
    """Return a tensor, gathered if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(tensors):
    """Join tensors, or the parameters of a model, to one vector of float64."""
    tensors = tensors.parameters() if isinstance(tensors, torch.nn.Module) else tensors
    return torch.cat([whole(t.detach()).double().reshape(-1) for t in tensors])


def assert_same_weights(model, other, tolerance=1e-9):
    """Compare weights; the tolerance is relative to the largest, as small ones are known no better."""
    found, expected = flat(model), flat(other)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def sgd(parameters, rate=0.1, **options):
    return torch.optim.SGD(parameters, lr=rate, **options)


FIELDS = {field.name for field in fields(Promise)}


def protect(model, optimizer, loss=loss, **options):
    """Return a keeper with these options, those of its promise among them; by default GEM, on all examples."""
    own = {"examples": None} | {name: options.pop(name) for name in FIELDS & options.keys()}
    promise = loss if isinstance(loss, Promise) else Promise(loss, **own)
    return Keeper(model, optimizer, promise, **{"on": "gradient"} | options)


def begin(loss=loss, tasks=(), *, model=None, make=sgd, **options):
    """Return a model, its optimizer, and a keeper of tasks with these options; of several, names may be given."""
    model = perceptron() if model is None else model
    optimizer = make(model.parameters())
    keeper = protect(model, optimizer, loss, **options)
    for name, one in tasks.items() if isinstance(tasks, dict) else enumerate(tasks):
        keeper.keep([one], name=name)
    return model, optimizer, keeper


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def gradient(model):
    """Return the gradient as a vector; entries of parameters that have none are left out."""
    return flat(p.grad for p in trainable(model) if p.grad is not None)


def moved(model, step):
    """Take a step; return by how much it has lowered the trainable parameters."""
    before = flat(trainable(model))
    step()
    return before - flat(trainable(model))


def take(model, optimizer, batch):
    """Train on a batch; return its gradient, and the step as it is seen from outside."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    return gradient(model), moved(model, optimizer.step)


def unlearn(model, optimizer, batch, steps):
    """Train on a task that contradicts the batch."""
    for _ in range(steps):
        take(model, optimizer, rival(batch))


def through_a_file(state):
    """Return a state as it comes back from a file."""
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=True)


def rows(model, tasks, loss=loss):
    """Return the gradient of the loss of each task as a row."""
    return torch.stack([flat(torch.autograd.grad(loss(model, one), trainable(model))) for one in tasks])


def cosines(G, step):
    return (G @ step) / (G.norm(dim=1) * step.norm())


def adam_weights(model, optimizer, G):
    """Adam's metric from its published formula; its second moment is no less than those of the constraints."""
    least = G.abs().amax(0).split([p.numel() for p in model.parameters()])
    parts = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            v = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
            v_hat = v / (1 - group["betas"][1] ** float(state["step"]))
            root = torch.maximum(v_hat.sqrt().reshape(-1), least[len(parts)])
            parts.append((root + group["eps"]) / float(group["lr"]))
    return torch.cat(parts)


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
