"""One driver for each framework: the same training in the loop of each of them, and in a plain one.

A driver makes a model and the keeper, trains, keeps a task, saves and resumes. With one more class here a new
framework takes part in `test_frameworks.py`; what only it has gets a file of its own.
"""

import importlib
import math
import sys
from contextlib import nullcontext
from inspect import signature

import pytest
import torch
from loops import trainable
from models import perceptron, rival, task
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import gemproj.torch
from gemproj.torch import Promise

WINDOW, CLIP = 2, 0.1  # batches of a step; largest norm of its gradient
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}  # of a Trainer
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def batches(k, n=6, dtype=torch.float64):
    """Draw tasks that contradict each other."""
    made = [rival(task(10 * k + i, 4, dtype), k) for i in range(n)]
    return [{"x": x, "y": y} for x, y in made]


class BreakingOff(list):
    """Batches, of which the fourth cannot be had."""

    def __getitem__(self, i):
        if i == 3:
            raise ConnectionError("on purpose")
        return super().__getitem__(i)


def adamw(model):
    return torch.optim.AdamW(trainable(model), lr=0.05, weight_decay=0.0)


class Output(dict):
    """What models of transformers return."""

    loss = property(lambda self: self["loss"])


class Net(torch.nn.Module):
    """Takes batches as models of transformers do."""

    def __init__(self, precision=None):
        super().__init__()
        self.net = perceptron(torch.float32 if precision in HALF else torch.float64)
        # So small that gradients vanish in float16, unless they are scaled.
        self.size = 2.0**-22 if precision == "fp16" else 1.0

    def forward(self, x, y=None):
        said = self.net(x)
        return said if y is None else Output(loss=self.size * cross_entropy(said, y))


ALL = Promise(examples=None)


def forget_accelerate():
    """Forget what Accelerate keeps for a process, if it is used there."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class Driver:
    """What drivers share.

    ``norms`` has the norms of the projected gradients that were clipped, ``logged`` the numbers of the last step
    of each training, where a framework tells them.
    """

    needs: str  # a module
    window, clip = WINDOW, CLIP
    lasts = False  # whether the keeper is attached for life, not for one training
    tells = False  # whether the framework tells callbacks of an error

    def __init__(self, folder, promise=ALL, precision=None, model=None, **options):
        pytest.importorskip(self.needs)
        self.folder, self.precision, self.model = folder, precision, model or Net(precision)
        self.norms, self.logged = [], []
        fp16 = precision == "fp16"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2, enabled=fp16)
        self.prepare()
        self.keeper = self.make(promise, **({"on": "gradient"} | options))

    def prepare(self):
        """Have the framework take the model, where it does so before the keeper is made."""

    def make(self, promise, **options):
        name = self.needs.partition(".")[0]
        callback = importlib.import_module(f"gemproj.integrations.{name}").KeeperCallback
        return callback(promise=promise, **options)

    def keep(self, data, **options):
        self.keeper.keep(DataLoader(data, batch_size=None), **options)

    def halve(self, accelerator):
        """Have Accelerate train in float16 on the CPU, which it refuses, though torch can."""
        if self.precision == "fp16":
            accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
            accelerator.scaler = self.scaler

    def hooks(self, optimizer=None):
        """Return how many hooks of gemproj an optimizer has: by default that of the last training."""
        optimizer = optimizer or self.optimizer
        bare = getattr(optimizer, "optimizer", optimizer)
        hooks = [*bare._optimizer_step_pre_hooks.values(), *bare._optimizer_step_post_hooks.values()]
        return sum(getattr(hook, "__module__", "").startswith("gemproj.") for hook in hooks)


class Plain(Driver):
    """A loop by hand, which all others are compared with."""

    needs, lasts, active = "torch", True, 0

    def __init__(self, *args, like=Driver, **options):
        self.window, self.clip = like.window, like.clip
        super().__init__(*args, **options)

    def context(self):
        half = HALF.get(self.precision)
        return torch.autocast("cpu", half) if half else nullcontext()

    def make(self, promise, **options):
        loss = promise.loss

        def in_context(model, batch):
            with self.context():
                return loss(model, batch)

        self.optimizer = adamw(self.model)
        if self.precision:
            promise = gemproj.torch.promise.replace(promise, loss=in_context)
        return gemproj.torch.Keeper(self.model, self.optimizer, promise, scaler=self.scaler, **options)

    def train(self, data):
        self.optimizer.state.clear()
        for i, batch in enumerate(data):
            with self.context():
                loss = self.model(**batch).loss / self.window
            self.scaler.scale(loss).backward()
            if i % self.window == self.window - 1:
                self.scaler.unscale_(self.optimizer)
                norm = 0.0
                if self.clip is not None:
                    norm = self.keeper.clip_grad_norm_(self.clip)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                if self.clip is not None:
                    self.norms.append(float(self.keeper._steps[0].norm if norm.isfinite() else norm))
                self.active += self.keeper.last.num_active if self.keeper.last else 0


class Accelerate(Driver):
    needs, lasts = "accelerate", True

    def prepare(self):
        from accelerate import Accelerator

        bf16 = "bf16" if self.precision == "bf16" else None
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, mixed_precision=bf16)
        self.halve(self.accelerator)
        self.model, self.optimizer = self.accelerator.prepare(self.model, adamw(self.model))

    def make(self, promise, **options):
        from gemproj.integrations.accelerate import Keeper

        return Keeper(self.accelerator, self.model, self.optimizer, promise, **options)

    def train(self, data, epochs=1, resume=False, save=False):
        if resume:
            self.accelerator.load_state(self.folder)
        else:
            self.optimizer.optimizer.state.clear()  # as if it were new
        for batch in [*DataLoader(data, batch_size=None)] * (epochs - resume):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                if self.accelerator.sync_gradients:
                    self.keeper.clip_grad_norm_(CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
        if save:
            self.accelerator.save_state(self.folder)


class Transformers(Driver):
    needs = "transformers"

    def trainer(self, data, *callbacks, **changes):
        from transformers import Trainer, TrainingArguments

        class InOrder(Trainer):
            def get_train_dataloader(self, data=None):
                return DataLoader(self.train_dataset, batch_size=None)

            get_eval_dataloader = get_train_dataloader

        options = {"num_train_epochs": 1, "gradient_accumulation_steps": WINDOW, "max_grad_norm": CLIP}
        options |= {"learning_rate": 0.05, "lr_scheduler_type": "constant", "bf16": self.precision == "bf16"}
        options |= QUIET | {"logging_steps": 1}
        arguments = TrainingArguments(str(self.folder), **(options | changes))
        both = {"train_dataset": data, "eval_dataset": data}
        self.now = InOrder(self.model, arguments, callbacks=[self.keeper, *callbacks], **both)
        self.now.model_accepts_loss_kwargs = False  # else sums of losses, for models that do not count items
        self.halve(self.now.accelerator)
        return self.now

    def train(self, data, *callbacks, resume=None, save=False, epochs=1, **changes):
        changes |= {"num_train_epochs": epochs} | ({"save_strategy": "epoch"} if save else {})
        self.trainer(data, *callbacks, **changes).train(resume_from_checkpoint=resume)
        logs = [log for log in self.now.state.log_history if "loss" in log]
        # The oldest Trainer logs no norm of a skipped step.
        self.norms += [log.get("grad_norm", math.nan) for log in logs]
        self.logged.append({name: n for name, n in logs[-1].items() if name.startswith("keep/")})
        return logs

    @property
    def optimizer(self):
        return self.now.optimizer


class Lightning(Driver):
    needs, manual, tells = "lightning.pytorch", False, True

    def prepare(self):
        import lightning.pytorch as pl

        driver = self

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.model, self.automatic_optimization = driver.model, not driver.manual

            def forward(self, *args, **named):
                return self.model(*args, **named)

            def training_step(self, batch, i):
                loss = self(**batch).loss
                if self.automatic_optimization:
                    return loss
                self.manual_backward(loss / WINDOW)
                if i % WINDOW == WINDOW - 1:
                    optimizer = self.optimizers()
                    driver.keeper.clip_grad_norm_(CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
                return None

            def test_step(self, batch, i):
                pass

            def configure_optimizers(self):
                return adamw(self)

        self.module = Module()

    def trainer(self, **changes):
        from lightning.pytorch import Trainer
        from lightning.pytorch.plugins import MixedPrecision

        options = {"max_epochs": 1, "callbacks": [self.keeper], "accelerator": "cpu", "log_every_n_steps": 1}
        unwanted = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options |= dict.fromkeys(unwanted, False)
        if not self.manual:  # where the module does both
            options |= {"accumulate_grad_batches": WINDOW, "gradient_clip_val": CLIP}
        if self.precision == "bf16":
            options["precision"] = "bf16-mixed"
        if self.precision == "fp16":
            options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler=self.scaler)
        self.now = Trainer(**(options | changes))
        return self.now

    def train(self, data, resume=False, save=False, epochs=1, **changes):
        checkpoint = self.folder / "last.ckpt"
        resumed = {"ckpt_path": checkpoint, "weights_only": True} if resume else {}
        fit = self.trainer(max_epochs=epochs, **changes).fit
        if "weights_only" not in signature(fit).parameters:  # Lightning before 2.6
            resumed.pop("weights_only", None)
        fit(self.module, DataLoader(data, batch_size=None), **resumed)
        logs = self.now.logged_metrics
        self.logged.append({name: float(n) for name, n in logs.items() if name.startswith("keep/")})
        if save:
            self.now.save_checkpoint(checkpoint)

    @property
    def optimizer(self):
        return self.now.optimizers[0]


class LightningByHand(Lightning):
    """Lightning, with a module that takes its steps itself."""

    manual = True


LOOPS = [Accelerate, Transformers, Lightning, LightningByHand]
CALLBACKS = [Transformers, Lightning]


class Avalanche(Driver):
    """Its strategies do not accumulate, and the plugin keeps patterns of its own choice, by default all."""

    needs, window, clip = "torch", 1, None

    def prepare(self):
        import_avalanche()

    def make(self, promise, **options):
        from gemproj.integrations.avalanche import KeeperPlugin

        return self.use(KeeperPlugin(promise, **options))

    def use(self, plugin):
        from avalanche.training.supervised import Naive

        self.optimizer = adamw(self.model)
        options = {"train_mb_size": 4, "train_epochs": 1, "plugins": [plugin], "evaluator": None}
        self.strategy = Naive(
            model=self.model, optimizer=self.optimizer, criterion=torch.nn.CrossEntropyLoss(), **options
        )
        return plugin

    def train(self, data, label=0):
        from avalanche.benchmarks import tensors_benchmark

        self.optimizer.state.clear()
        both = [tuple(torch.cat([batch[name] for batch in data]) for name in "xy")]
        self.stream = tensors_benchmark(both, both, task_labels=[label]).train_stream
        self.strategy.train(self.stream[0], shuffle=False)

    def keep(self, data):
        """Do nothing: the strategy does it."""


def import_avalanche():
    """Import Avalanche, or skip the test and tell why."""
    try:
        import avalanche  # noqa: F401
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"Avalanche cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)
