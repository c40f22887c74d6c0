"""Texts that a model writes itself, sets that are held out, and a teacher that stores nothing."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from frameworks import QUIET
from loops import begin, flat, through_a_file
from models import adapted, language_model, logits, perceptron, rival, task, tokenizer
from torch.utils.data import default_collate

from gemproj.torch import Keeper, Promise
from gemproj.torch.losses import CrossEntropy, Distillation
from gemproj.torch.references import _Writer, write_references

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
BATCH = {"input_ids": 2 + 5 * torch.arange(18).view(3, 6) % 17, "attention_mask": torch.ones(3, 6).long()}
WORDS = [*(f"w{k}" for k in range(16)), "user", "assistant"]


def tools(kind="llama", chat=False):
    words = tokenizer(WORDS)
    words.chat_template = TEMPLATE if chat else None
    return language_model(kind, max_position_embeddings=64), words


def write(*tools, n=6, **options):
    return write_references(*tools, n, **{"tokens": 12, "batch": 4, "progress": False} | options)


@pytest.mark.parametrize("kind", ["llama", "llama with adapters", "bart"])
def test_other_models(kind):
    model, words = tools(kind.split()[0])
    texts = write(adapted(model, target_modules=["q_proj"]) if "adapters" in kind else model, words)
    assert len(texts) == 6
    assert all(("labels" in one) == (kind == "bart") for one in texts)
    assert len({tuple(one["input_ids"]) for one in texts}) == 6


def test_a_model_of_experts_may_return_what_its_router_says():
    _, words = tools(chat=True)
    experts = {"num_local_experts": 2, "num_key_value_heads": 2, "output_router_logits": True}
    model = language_model("mixtral", max_position_embeddings=64, **experts)
    assert len(write(model, words)) == 6
    assert model.config.output_router_logits


def test_nothing_else_moves():
    model, words = tools()
    model.model.layers[0].eval()
    modes, weights = [m.training for m in model.modules()], flat(model)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first, again = write(model, words, seed=1), write(model, words, seed=1)
    assert torch.equal(torch.rand(4), expected)
    assert first == again != write(model, words, seed=2)
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(flat(model), weights)


def test_only_the_device_of_the_model_is_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: pytest.fail(f"{device} was read"))
    write(*tools())


def test_keys_of_the_cache():
    """Whatever changes what is written changes the key."""
    model, words = tools()
    other, again = tokenizer(WORDS[::-1]), tokenizer(WORDS)
    again.eos_token = "w1"
    model = adapted(model, target_modules=["q_proj"])
    model.add_adapter("b", model.peft_config["default"])
    keys = [_Writer(model, one, 8, 1.0).key({}) for one in (words, tokenizer(WORDS), other, again)]
    assert keys[0] == keys[1]
    model.set_adapter("b")
    keys.append(_Writer(model, words, 8, 1.0).key({}))
    with model.disable_adapter():
        keys.append(_Writer(model, words, 8, 1.0).key({}))
    model.generation_config.eos_token_id = 5
    keys.append(_Writer(model, words, 8, 1.0).key({}))
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["b"] *= 2
    keys.append(_Writer(model, words, 8, 1.0).key({}))
    model.config.rms_norm_eps = 0.1
    keys.append(_Writer(model, words, 8, 1.0).key({}))
    assert len(set(keys)) == len(keys) - 1


def test_a_model_that_is_saved_and_loaded_has_its_key(tmp_path):
    model, words = tools()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    again.config.use_cache = False  # as a Trainer sets it
    assert len({_Writer(one, words, 8, 1.0).key({}) for one in (model, again)}) == 1


def test_a_new_adapter_has_the_key_of_another_one():
    """One of its factors is random, and has no effect while the other one is zero."""
    peft = pytest.importorskip("peft")
    keys, config = [], peft.LoraConfig(r=2, target_modules=["q_proj"])
    for seed in (1, 2):
        model, words = tools()
        torch.manual_seed(seed)
        model = peft.get_peft_model(model, config)
        keys.append(_Writer(model, words, 8, 1.0).key({}))
        for name, p in model.named_parameters():
            p.data += "lora_B" in name
        keys.append(_Writer(model, words, 8, 1.0).key({}))
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("chat", [False, True])
def test_texts_fit_the_positions_of_the_model(chat):
    _, words = tools(chat=chat)
    model = language_model("gpt2", n_positions=32)
    lengths = [len(one["input_ids"]) for one in write(model, words, tokens=128)]
    assert max(lengths) <= 32


def test_texts_come_from_a_cache_and_one_that_is_of_no_use_stops_nothing(tmp_path, monkeypatch):
    model, words = tools()
    first = write(model, words, cache=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "generate", lambda *args, **options: pytest.fail("texts were written"))
        assert write(model, words, cache=tmp_path) == first
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    for damaged in (whole[:20], "", "null", "{}", "[1, 2]", "[{}, {}, {}, {}, {}, {}]"):
        file.write_text(damaged)
        assert write(model, words, cache=tmp_path) == first
        assert file.read_text() == whole
    assert list(tmp_path.iterdir()) == [file]
    with pytest.warns(UserWarning, match="texts that the model wrote are not stored"):
        assert write(model, words, cache=file / "folder") == first

    def homeless(path):
        raise RuntimeError("no home directory")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.warns(UserWarning, match="are not stored, .*: no home directory"):
        assert write(model, words, cache="~/folder") == first


ANSWERS = [lambda k: [1], lambda k: [2, 3, 4, 5, 6, 7, 8, 9, 1], lambda k: [2 + k % 18] * 12, None]


@pytest.mark.parametrize("answer", ANSWERS)
def test_useless_answers_of_a_chat_model_are_refused(answer, monkeypatch):
    """Empty, the same each time, or of one word; or there is no question."""
    model, words = tools(chat=True)
    generate, asked, numbers = model.generate, [], itertools.count()

    def says(input_ids, **options):
        asked.append(len(set(map(tuple, input_ids.tolist()))) == 1)  # the beginning of the template
        if answer and asked[-1]:
            return generate(input_ids=input_ids, **options)
        new = [answer(next(numbers)) if answer else [1] for _ in input_ids]
        return torch.cat([input_ids, torch.tensor(new)], 1)

    monkeypatch.setattr(model, "generate", says)
    with pytest.raises(ValueError, match=r"Only [01] of \d+ texts .*, or the answers in them, are empty"):
        write(model, words)


def test_inputs_of_an_encoder_begin_at_its_first_position():
    model, words = tools("bart")
    with torch.no_grad():
        model.model.encoder.embed_positions.weight.normal_()
    seen, short = [], [2, 3, 4]
    model.model.encoder.register_forward_hook(lambda module, given, out: seen.append(out[0][0, :3]))
    writer = _Writer(model.eval(), words, 4, 1.0)
    for prompts in ([short], [short, [5] * 9]):
        writer._written(prompts)
    torch.testing.assert_close(*seen)


def test_other_generation_configs():
    """Also strings that end a text, after which there is padding."""
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    words = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: k for k, c in enumerate("_abcdefghijklmnopqrs")}, [])
    )
    words.decoder = tokenizers.decoders.Fuse()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="_")
    model, _ = tools()
    others = {"return_dict_in_generate": True, "num_return_sequences": 2, "stop_strings": ["s", "e"]}
    for name, value in ({"do_sample": True} | others).items():
        setattr(model.generation_config, name, value)
    texts = [one["input_ids"] for one in write(model, words, tokens=40)]
    assert len(set(map(len, texts))) > 1
    assert all(one[-1] != words.pad_token_id for one in texts)
    assert _Writer(model, words, 9, 1.0)._ended([5, 3, words.pad_token_id]) == [5, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("max_time", 1e-9),
        ("prompt_lookup_num_tokens", 2),
        ("dola_layers", "high"),
        ("force_words_ids", [[3]]),
    ],
)
def test_a_generation_config_that_searches_or_stops_changes_nothing(name, value):
    (model, words), expected = tools(), write(*tools())
    setattr(model.generation_config, name, value)
    assert write(model, words) == expected


PARTS = "(m['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)"


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("m['content']", PARTS)])
def test_the_chat_template_of_a_processor(template):
    """Such a template may take lists of parts only."""
    model, words = tools()
    processor = SimpleNamespace(tokenizer=words, chat_template=template)
    assert "assistant" in words.decode(write(model, processor, n=1)[0]["input_ids"]).split()
    assert words.chat_template is None


def test_a_chat_template_may_begin_with_what_the_user_says():
    model, words = tools()
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert len(write(model, words)) == 6


@pytest.mark.parametrize("special", [False, True])
# Of the last one, the answer begins so.
@pytest.mark.parametrize("template", [" [ASK] {} [/ASK] ", " [ASK] {} [/ASK] w12 ", "{}"])
def test_a_question_ends_where_the_template_ends_it(template, special, monkeypatch):
    """Also if the model writes on, because no token that ends a text is there."""
    model, _ = tools()
    words = tokenizer([*WORDS[:14], "[ASK]", "[/ASK]"])
    words.chat_template = "{% for m in messages %}" + template.format("{{ m['content'] }}") + "{% endfor %}"
    words.chat_template += "" if "ASK" in template else "{% if add_generation_prompt %} [/ASK] {% endif %}"
    if special:
        words.add_special_tokens({"additional_special_tokens": ["[ASK]", "[/ASK]"]})
    number = itertools.count()

    def says(input_ids, **given):
        asked = "[/ASK]" not in words.decode(input_ids[0])
        rows = [
            f"w{next(number) % 9} w9 w10 w11{' [/ASK] w12 w13' if asked else ''} <end>" for _ in input_ids
        ]
        return torch.cat([input_ids, torch.tensor(words(rows)["input_ids"])], 1)

    monkeypatch.setattr(model, "generate", says)
    for one in write(model, words):
        asked, _, answer = words.decode(one["input_ids"]).partition(" [/ASK] ")
        assert asked.split()[-4:][1:] == ["w9", "w10", "w11"]
        assert answer.split()[-4:] == ["w9", "w10", "w11", "<end>"]


@pytest.mark.parametrize(
    ("new", "of_use"),
    [
        (lambda k: [k] * 12, 0),  # of one word
        (lambda k: [k, k + 1, k + 2], 0),  # short
        (lambda k: range(2, 14) if k % 2 else range(14, 2, -1), 2),  # each text is taken once
    ],
)
def test_useless_texts_are_refused(new, of_use, monkeypatch):
    (model, words), numbers = tools(), itertools.count(2)

    def says(input_ids, **given):
        return torch.cat([input_ids, torch.tensor([[*new(next(numbers) % 18)] for _ in input_ids])], 1)

    monkeypatch.setattr(model, "generate", says)
    with pytest.raises(ValueError, match=f"Only {of_use} of 20 texts"):
        write(model, words)


# --- sets that are held out -------------------------------------------------------------------------

EACH = CrossEntropy(logits, labels=1)


def held_out(n=40, promise=EACH, share=0.5):
    """Return a model, a keeper of n examples, of which a share is held out, and these."""
    model, _, keeper = begin(Promise(EACH))
    keeper.keep([task(0, n)], promise, name="old", hold_out=share)
    return model, keeper, keeper.sets["old"].held


def shift(model, *by):
    with torch.no_grad():
        model[2].bias.add_(torch.tensor(by))


def test_held_out_examples_are_kept_apart():
    _, keeper, held = held_out(50, share=0.2)
    both = torch.stack([x for x, _ in [*keeper.sets["old"].examples, *held.examples]])
    assert (len(keeper.sets["old"]), len(held)) == (40, 10)
    keeper.keep([task(1, 5)], hold_out=0.2)
    assert "\nset 1, 1 held out: " in repr(keeper.report())
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, task(0, 50)[0].tolist()))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10, 40])
def test_interval(n):
    """Student's, of the mean difference from the losses when kept; of one example nothing is known."""
    stats = pytest.importorskip("scipy.stats")
    model, keeper, held = held_out(2 * n)
    shift(model, 1.0, 0.0, -1.0)
    now = EACH(model, default_collate(held.examples)).detach()
    mean, low, high = keeper.report()["old"].held_out
    assert mean == pytest.approx(float(now.mean()))
    half = math.inf if n == 1 else stats.t.ppf(0.975, n - 1) * float((now - held.losses).std()) / n**0.5
    assert [mean - low, high - mean] == pytest.approx([half, half], rel=0.02)  # of an expansion


def test_an_interval_of_examples_that_have_moved_alike_is_a_point():
    """To rounding, which must not become the root of a negative number."""
    for n in range(3, 20):
        model, _, keeper = begin(lambda m, x: m.bias + 0.0 * x[:, 0], model=torch.nn.Linear(1, 1).double())
        keeper.keep([torch.ones(2 * n, 1).double()], hold_out=0.5)
        with torch.no_grad():
            model.bias.add_(0.1)
        mean, low, high = keeper.report()[0].held_out
        assert [low, high] == pytest.approx([mean, mean], abs=1e-7)


@pytest.mark.parametrize("tolerance", [None, 0.0, 0.01])
def test_only_without_a_tolerance_a_held_out_loss_may_be_above_its_bound_by_its_interval(tolerance):
    model, keeper, _ = held_out(promise=Promise(EACH, tolerance=tolerance))
    random, seen = torch.Generator().manual_seed(0), set()
    for _ in range(20):
        by = 0.3 * torch.randn(3, generator=random)
        shift(model, *by)
        report = keeper.report()
        line = report["old"]
        mean, low, _ = line.held_out
        assert line.kept != ("not kept" in repr(report))
        assert line.kept == ((low if tolerance is None else mean) <= line.held_bound)
        seen.add((line.kept, mean > line.held_bound, low > line.held_bound))
        shift(model, *-by)
    assert {(True, False, False), (tolerance is None, True, False), (False, True, True)} <= seen


def test_a_tolerance_alone_takes_the_rest_of_the_promise_and_is_that_of_held_out_examples():
    _, keeper, held = held_out(20, Promise(EACH, tolerance=5.0, examples=3), 0.2)
    keeper.keep([task(1, 20)], 0.01, name="old")
    assert keeper.sets["old"].promise == Promise(EACH, tolerance=0.01, examples=3)
    assert keeper.report()["old"].held_bound == pytest.approx(float(held.losses.mean()) + 0.01)


def test_held_out_examples_of_more_are_added_to_those_at_hand():
    keeper = begin(Promise(EACH))[2]
    for seed, share, held in ((0, 0.0, 0), (1, 0.25, 5), (2, 0.25, 10), (3, 0.0, 10)):
        keeper.keep([task(seed, 20)], name="old", hold_out=share)
        one = keeper.sets["old"]
        assert (len(one), 0 if one.held is None else len(one.held)) == (20 * (seed + 1) - held, held)
        assert (keeper.report()["old"].held_out is None) == (held == 0)


def test_held_out_examples_resume():
    (_, keeper, _), (_, other, _) = held_out(20), held_out(40)
    other.load_state_dict(through_a_file(keeper.state_dict()))
    assert other.report()["old"].held_out == keeper.report()["old"].held_out


# --- a teacher, and the Trainer ---------------------------------------------------------------------


def test_teacher_without_adapters():
    """The teacher is the model without its adapters, and nothing is stored."""
    model, _ = tools()
    base = language_model("llama", max_position_embeddings=64)
    model = adapted(model, target_modules=["q_proj", "v_proj"])
    stored, taught = Distillation(), Distillation(teacher="base")
    assert taught.outputs(model, BATCH) is None
    expected = stored(model, BATCH, stored.outputs(base, BATCH))
    torch.testing.assert_close(taught(model, BATCH), expected)
    assert expected.min() > 1e-4
    for name, p in model.named_parameters():
        p.requires_grad_("lora_B" in name)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    keeper = Keeper(model, optimizer)
    apart = expected.mean().item()
    keeper.keep([BATCH], Promise(taught, tolerance=0.5 * apart), name="chat")
    assert keeper.sets["chat"].outputs == []
    line = keeper.report()["chat"]  # the adapters are far from it already
    assert (line.stored, line.bound, line.kept) == (0.0, pytest.approx(0.5 * apart), False)
    assert line.now == pytest.approx(apart, rel=1e-5)
    with pytest.warns(UserWarning, match="keeps what the model says with its adapters, .* nats from what it"):
        keeper.keep([BATCH], Promise(stored, tolerance=0.5 * apart), name="with adapters")
    both = Distillation(labels=CrossEntropy(shift=True))  # of which only the divergence is compared
    keeper.keep([BATCH | {"labels": BATCH["input_ids"]}], Promise(both, tolerance=2.0 * apart), name="nearer")
    keeper.forget("with adapters")
    keeper.forget("nearer")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    model(input_ids=BATCH["input_ids"], labels=BATCH["input_ids"]).loss.backward()
    optimizer.step()
    assert keeper.last.names == ["chat"]
    model.merge_adapter()
    merged = {name: p.clone() for name, p in model.named_parameters()}
    keeper.report()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, merged[name])
    with pytest.raises(TypeError, match="needs a model of peft"):
        Distillation(logits, teacher="base")(perceptron(), rival(task(0)))


def test_a_promise_about_a_teacher_is_one_for_every_adapter():
    model = adapted(language_model("llama", max_position_embeddings=64), target_modules=["q_proj"])
    model.add_adapter("b", model.peft_config["default"])
    held = [p for name, p in model.named_parameters() if "lora" in name]
    optimizer = torch.optim.AdamW([p.requires_grad_() for p in held], lr=1e-3)
    keeper = Keeper(model, optimizer, Promise(Distillation(teacher="base"), tolerance=0.0))
    keeper.keep([BATCH], name="chat")
    model.set_adapter("b")
    keeper.keep([BATCH], name="chat")
    model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
    optimizer.step()
    assert (len(keeper.sets["chat"]), keeper.last.names) == (6, ["chat"])
    assert keeper.report()["chat"].kept is not None
    assert not keeper.sets["chat"].is_of("")  # when adapters have been merged, there is no base


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_base_from_which_adapters_were_subtracted_is_no_teacher(init, recwarn):
    peft, model = pytest.importorskip("peft"), language_model("llama", max_position_embeddings=64)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, init_lora_weights=init, target_modules=["q_proj", "v_proj"])
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    keeper = Keeper(model, optimizer)
    keeper.keep([BATCH], Promise(Distillation(), tolerance=1e-9))
    assert not [one for one in recwarn if "without its adapters" in str(one.message)]
    with pytest.raises(ValueError, match=f"init_lora_weights='{init}' has subtracted them"):
        keeper.keep([BATCH], Promise(Distillation(teacher="base")))


def test_adapters_that_are_put_into_a_model_are_kept_with_it():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
    model = peft.inject_adapter_in_model(config, tools()[0])
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    for p in model.parameters():
        p.requires_grad_(any(p is one for one in trained))
    keeper = Keeper(model, torch.optim.AdamW(trained))
    keeper.keep([BATCH], Promise(Distillation(), tolerance=1e-9), name="chat")
    assert len(keeper.sets["chat"].outputs) == 3


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Return a function that makes a Trainer; few and short texts are written, and noted in its `texts`."""
    transformers, texts = pytest.importorskip("transformers"), []
    from gemproj.integrations import transformers as integration

    def write(*given, **options):
        texts.extend(write_references(*given, tokens=12, **options))
        return texts

    def make(model, words, *callbacks, **options):
        new = [{"input_ids": (x := torch.randint(2, 20, (8,))), "labels": x} for _ in range(16)]
        options = {"per_device_train_batch_size": 4, "max_steps": 4} | QUIET | options
        return transformers.Trainer(
            model, transformers.TrainingArguments(str(tmp_path / "run"), **options), train_dataset=new,
            eval_dataset=new[:4], processing_class=words, callbacks=[*callbacks],
            data_collator=transformers.default_data_collator,
        )  # fmt: skip

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(integration, "_TEXTS_WRITTEN", 10)
    monkeypatch.setattr(integration, "write_references", write)
    make.texts, make.callback = texts, integration.KeeperCallback
    return make


def test_one_line(trainer, tmp_path):
    """Without data, the callback of the Trainer lets the model write what it keeps, and logs what is held out."""
    tried, callback = tools(chat=True), trainer.callback()
    one = trainer(*tried, callback, logging_steps=2, eval_strategy="steps", eval_steps=2)
    said = one.train().metrics
    kept = callback.sets["references"]
    assert (len(kept), len(kept.held), kept.promise.allowed) == (8, 2, 0.05)
    assert said["keep/references/held_out_low"] <= said["keep/references/held_out"] < 0.05
    evaluated = [log for log in one.state.log_history if "eval_loss" in log]
    assert ["keep/references/held_out" in log for log in evaluated] == [True, True]
    assert callback.report().kept
    assert "references, 2 held out: " in repr(callback.report())
    for other in (None, pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=4)):
        with pytest.raises(ValueError, match="pass processing_class=tokenizer"):
            trainer(tried[0], other, trainer.callback()).train()
    assert list((tmp_path / "gemproj").glob("references-*.json"))


def test_with_the_base_as_teacher_the_base_writes(trainer):
    model, words = tools(chat=True)
    expected = write_references(model, words, 6, tokens=12, progress=False)
    model = adapted(model, target_modules=["q_proj", "v_proj"])
    callback = trainer.callback(promise=Promise(Distillation(teacher="base")), limit=6)
    trainer(model, words, callback, max_steps=1).train()
    assert trainer.texts == expected
    assert len(callback.sets["references"]) == 5
