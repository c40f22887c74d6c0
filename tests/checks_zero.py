"""What each process checks of DeepSpeed's ZeRO, stages 1 to 3."""

import importlib
import os
import tempfile
from functools import partial

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from deepspeed.utils import safe_get_full_fp32_param
from frameworks import CLIP, Net, Transformers, batches, forget_accelerate
from loops import begin, flat, take
from models import BOTH, EACH, loss, perceptron, rival, task
from processes import alone, check, learn, same_everywhere, share

import gemproj.torch
from gemproj.integrations.accelerate import Keeper
from gemproj.integrations.deepspeed import Keeper as KeeperOfEngine
from gemproj.torch import Promise

# DeepSpeed would compile an operator of its own for processes of one machine.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
ALL = {"examples": None}
PROMISES = [
    (Promise(loss, weight=0.5, **ALL), {}),
    (Promise(loss, penalty=0.5, **ALL), {"look": 2}),
    (Promise(EACH, tolerance=0.01, **ALL), {"microbatch": 3}),
    (Promise(BOTH, tolerance=0.0, repair=0.5, **ALL), {}),
]


def adamw(parameters):
    """Make an optimizer with two groups, of which ZeRO makes two steps."""
    matrices, rest = [], []
    for p in parameters:
        (matrices if p.ndim > 1 else rest).append(p)
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "lr": 0.01}], lr=0.03)


def engine_for(model, stage, make=adamw, zero=None, **config):
    """Return the model under DeepSpeed; in stage 3 some parameters are partitioned, and some gathered."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10} | (zero or {})
    config = CONFIG | config | {"zero_optimization": zero}
    return deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=config)[0]


def whole(engine):
    return flat(safe_get_full_fp32_param(p) for p in engine.module.parameters())


def step_of(engine, batch):
    engine.backward(loss(engine, batch))
    engine.step()


def of_one(promise=loss, clip=torch.inf, **options):
    """Train one process; return the model and its keeper."""
    model, optimizer, keeper = begin(
        promise, model=perceptron(torch.float32), make=adamw, on="step", process_group=alone(), **options
    )

    def take_step(batch):
        keeper.clip_grad_norm_(clip)
        take(model, optimizer, batch)

    learn(keeper, take_step, dtype=torch.float32)
    return model, keeper


@check(2)
def deepspeed_trains_as_one_process():
    """In one check, since DeepSpeed keeps its process groups."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for number, (promise, options) in enumerate(PROMISES):
        # With a weight gradients are clipped, which scales it.
        one, plain = of_one(promise, torch.inf if number else 0.1, **options)
        clipping = {} if number else {"gradient_clipping": 0.1}
        for stage in (1, 2, 3) if number == 0 else (1 + number % 3, 1 + (number + 1) % 3):
            engine = engine_for(perceptron(torch.float32), stage, **clipping)
            keeper = KeeperOfEngine(engine, promise, **options)
            learn(keeper, partial(step_of, engine), share, torch.float32)
            found = whole(engine)
            same_everywhere(found)
            torch.testing.assert_close(found, flat(one), rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(keeper.last.cosines, plain.last.cosines, rtol=1e-2, atol=1e-4)
            # What the model computes with follows the shards that were changed.
            x = task(0, 4, torch.float32)[0]
            torch.testing.assert_close(engine.module(x), one(x), rtol=1e-3, atol=1e-3)
    low_precision()
    scaled()
    errors()
    accelerated()
    trainer()


def low_precision():
    for stage in (1, 2, 3):
        engine = engine_for(perceptron(), stage, bf16={"enabled": True})
        keeper = KeeperOfEngine(engine, in_bfloat16)
        keeper.keep([share(task(0, 8, torch.bfloat16), [5, 3])])
        for step in range(4):
            engine.backward(loss(engine, share(rival(task(step, 8, torch.bfloat16)))))
            engine.step()
            assert keeper.last.worst_cosine > -1e-6  # the shards have float32
        same_everywhere(whole(engine))
        rounded = flat(engine.module.state_dict().values()) if stage < 3 else whole(engine)
        torch.testing.assert_close(rounded, whole(engine), rtol=2**-8, atol=1e-6)


def scaled():
    """Losses of kept examples are scaled as those of training, so that their gradients do not underflow."""
    engine = engine_for(perceptron(torch.float32), 1)
    engine.optimizer.loss_scaler.cur_scale = 2.0**14
    keeper = KeeperOfEngine(engine, lambda model, batch: loss(model, batch).half() * 2**-26)
    keeper.keep([share(task(0, 8, torch.float32))])
    step_of(engine, share(task(1, 8, torch.float32)))
    assert keeper.rows.G.norm() > 0


def in_bfloat16(model, batch):
    return loss(lambda x: model(x).float(), batch)


def errors():
    engine = engine_for(perceptron(torch.float32), 1)
    for on in ("gradient", "both"):
        with pytest.raises(ValueError, match=f"on='{on}' needs gradients, which DeepSpeed reduces"):
            KeeperOfEngine(engine, loss, on=on)
    low = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    for text, stage, config in (
        ('"round_robin_gradients"', 2, {"zero": {"round_robin_gradients": True}}),
        ("BF16_Optimizer.*in bfloat16 stage 2 or more", 1, low),
    ):
        other = engine_for(perceptron(torch.float32), stage, **config)
        with pytest.raises(ValueError, match=text):
            KeeperOfEngine(other, loss)
    keeper = KeeperOfEngine(engine, loss)
    keeper.keep([task(0, 8, torch.float32)])
    before = whole(engine)
    gemproj.torch.detach(engine.optimizer)
    step_of(engine, task(1, 4, torch.float32))
    assert keeper.last is None
    assert not torch.equal(before, whole(engine))
    assert dist.get_world_size() == 2


def accelerated():
    """A loop of Accelerate takes the steps of a plain loop."""
    one, _ = of_one()
    for stage in (1, 3):
        forget_accelerate()
        plugin = DeepSpeedPlugin(zero_stage=stage)
        plugin.deepspeed_config |= CONFIG
        gloo = InitProcessGroupKwargs(backend="gloo")  # with cpu=True, DeepSpeed would be left out
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
        model = perceptron(torch.float32)
        model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
        keeper = Keeper(accelerator, model, optimizer, Promise(loss, **ALL), on="step")

        def take_step(batch, accelerator=accelerator, model=model, optimizer=optimizer):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()

        learn(keeper, take_step, share, torch.float32)
        torch.testing.assert_close(whole(model), flat(one), rtol=2e-4, atol=2e-5)


def trainer():
    """The callback of the Trainer projects and reports every step."""
    forget_accelerate()
    same = ("train_micro_batch_size_per_gpu", "gradient_clipping", "gradient_accumulation_steps")
    config = CONFIG | dict.fromkeys(same, "auto") | {"zero_optimization": {"stage": 2}}
    config["fp16"] = {"enabled": False}  # without it, transformers before 5 computes with float16
    with tempfile.TemporaryDirectory() as folder:
        driver = Transformers(folder, model=Net("bf16"), on="step")
        driver.keep(batches(0, dtype=torch.float32))
        now = batches(1, 8, torch.float32)
        logs = driver.train(now, use_cpu=False, ddp_backend="gloo", deepspeed=config)
    logs = [log for log in logs if "keep/violations" in log]
    assert len(logs) == 4
    assert sum(log["keep/violations"] for log in logs) > 0
    assert driver.now.args.max_grad_norm == CLIP
    assert min(log["keep/worst_cosine"] for log in logs) > -1e-6
    same_everywhere(whole(driver.now.model_wrapped))
