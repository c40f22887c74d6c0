"""The example of the chat model: the whole program on a small model with random weights."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.keep_chat import __main__ as program
from examples.keep_chat import model as chat
from examples.keep_chat import prepared, report
from examples.keep_chat.texts import Chat

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '#' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model of three layers, with a token for each byte."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(bytes_)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="#", pad_token="#")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 256}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    where = tmp_path_factory.mktemp("model")
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Folder of the results of one seed, and the options that continue them."""
    out = tmp_path_factory.mktemp("out")
    (out / "train.csv").write_text("".join(f'"{k % 4 + 1}","title {k}","news"\n' for k in range(12)))
    options = ["--form", "tiny", "--model", str(folder), "--cache", str(out / "cache"), "--out", str(out)]
    options += ["--data", str(out)]
    assert program.main([*options, "--jobs", "1"]) == 0
    return out, options


def written(out):
    return (out / "runs.jsonl").read_text().splitlines(keepends=True)


def records(lines):
    return {one["key"]: one for one in map(json.loads, lines) if "key" in one}


def test_every_run_is_recorded(finished):
    found = records(written(finished[0]))
    assert len(found) == 2 * len(program.METHODS["tiny"].split())
    for one in found.values():
        assert (one["kind"] == "before") == (one["held_out"] < 1e-6)
        assert ("accuracy" in one) == (one["skill"] == "news")
        assert ("worst" in one) == (one["kind"] in ("promise", "auto", "trainer"))
        assert ("verdict" in one) == (one["kind"] == "trainer")
    assert {(one["kept"], one["sets"]) for one in found.values()} == {(0, 1), (4, 1), (0, 3)}


def test_tables_and_figures(finished):
    out, _ = finished
    text = (out / "keep-chat.md").read_text()
    assert "Promise, tolerance 0.05" in text
    assert "Promise, tolerance as the gate" in text
    for name in ("asked-light.svg", "asked-dark.svg", "front-light.svg", "front-dark.svg"):
        assert (out / name).stat().st_size > 1000


RUNS = (Path(__file__).parents[1] / "docs/results/keep-chat").rglob("runs.jsonl")


@pytest.mark.parametrize("runs", sorted(RUNS), ids=lambda runs: runs.parent.name)
def test_committed_tables_follow_from_committed_runs(runs):
    found = list(report.Results(runs).records.values())
    assert report.page(found) + "\n" == runs.with_name("keep-chat.md").read_text()


def test_continues_where_it_stopped(finished, monkeypatch):
    out, options = finished
    *done, last, _ = written(out)
    (out / "runs.jsonl").write_text("".join(done) + last[:20])  # stopped while it wrote
    assert program.main([*options, "--jobs", "1"]) == 0
    again = records(written(out))
    assert len(again) == 2 * len(program.METHODS["tiny"].split())
    assert all(again[key] == one for key, one in records(done).items())


SEQUENCE = ["--skills", "sequence", "--methods", "plain"]
NEW = {"osf": "peft.tuners.osf", "intruder": "peft.tuners.lora.intruders"}  # in new versions of peft
OTHERS = ["plain@0.5", "average:0.5", "text:1", "own:1", "promise-own:0.05"]
OTHERS += [word for word, module in NEW.items() if find_spec(module)]


def test_other_methods_and_abilities(finished, tmp_path):
    options = finished[1]
    question = {"task": "sums", "prefix": "", "input": "1 and 1", "choices": ["2", "3"], "answers": ["2"]}
    (tmp_path / "abilities.jsonl").write_text(json.dumps(question) + "\n")
    more = ["--abilities", str(tmp_path / "abilities.jsonl"), "--out", str(tmp_path), "--skills", "news"]
    assert program.main([*options, "--jobs", "1", *more, "--methods", " ".join(OTHERS)]) == 0
    found = records(written(tmp_path)).values()
    kinds = {word.partition(":")[0].partition("@")[0] for word in OTHERS}
    assert {one["kind"] for one in found} == kinds
    assert {one["rate"] for one in found} == {1e-3, 5e-4}
    assert all(one["abilities"]["sums"] in (0.0, 1.0) for one in found)


def test_other_contents_are_other_texts(finished, folder, tmp_path, monkeypatch):
    """Each has a folder of its own for results; prompts that occur twice are taken once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("examples.common.results.work", lambda *given: None)
    monkeypatch.setattr(program.report, "publish", lambda *given: [])
    options = [*finished[1][:6], *SEQUENCE, "--instructions", "tasks.jsonl"]
    tasks = ({"task": f"{k // 4}", "input": f"{k % 2}?", "targets": [f"{k}"]} for k in range(20))
    task = "\n".join(map(json.dumps, tasks))
    outs, results = [], program.Results
    monkeypatch.setattr(program, "Results", lambda path: outs.append(path) or results(path))
    for text in (task, task.replace("?", "!"), task):
        (tmp_path / "tasks.jsonl").write_text(text)
        assert program.main(options) == 0
    assert outs[0] == outs[2] != outs[1]
    assert outs[0].parent.parent == Path("runs/keep_chat")
    data = prepared.read(finished[0] / "cache" / f"{outs[0].parent.name}.pt")
    assert len(data.train["sequence"]) == len(data.test["sequence"]) == 5
    (tmp_path / "tasks.jsonl").write_text(task.replace('"input": "1', '"input": "0'))
    assert program.main(options) == 2  # one prompt is left of each task


def test_no_news_are_generated(finished, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("AGNEWS_DIR", raising=False)
    assert program.main([*finished[1][:6], "--skills", "news"]) == 2
    assert "set AGNEWS_DIR to a folder with AG News" in " ".join(capsys.readouterr().out.split())


def test_a_report_needs_a_folder(capsys):
    assert program.main(["--report"]) == 2
    assert "--report needs --out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--report", "--out", "nowhere"], "has no finished runs"),
        ([*SEQUENCE, "--instructions", __file__], "line 1: JSON with task, input, targets"),
        (["--abilities", __file__], "test_keep_chat.py, line 1"),
        (["--methods", "promise:nan"], "VALUE is finite"),
        (["--methods", "promise:-1"], "VALUE is finite"),
        (["--methods", "plain@0"], "RATE is positive"),
        (["--methods", "plain#4"], "TEXTS are for text"),
        (["--methods", "text:1#7"], "TEXTS are 1 to 6"),
        (["--methods", "trainer:0.05#2"], "TEXTS are 3 to 6"),
        (["--methods", "promise:0.05*7"], "SETS are 1 to 6"),
        (["--methods", "average:0.5/all"], "average is for lora"),
        (["--methods", "intruder/all"], "intruder is for lora"),
        (["--skills", "poems"], "poems"),
        (["--methods", "promise"], "takes a value"),
        (["--methods", "promise:0.05#few"], "VALUE, SETS, TEXTS and RATE are numbers"),
        (["--methods", "promise:0.05/lara"], "unknown adapters"),
        (["--model", "nowhere"], "no folder"),
        (SEQUENCE, "--instructions"),
        (["--skills", "sequence"], "the Trainer shuffles"),
        (["--methods", "plain:3", "--model", "nowhere"], "takes no value"),  # before a model is fetched
    ],
)
def test_errors(finished, capsys, arguments, said):
    assert program.main([*finished[1], *arguments]) == 2
    assert said in " ".join(capsys.readouterr().out.split())


def test_upper_layers_say_what_the_whole_model_says(folder):
    model, tokenizer = chat.load(str(folder), "cpu")
    text = {"input_ids": torch.tensor(tokenizer("hello there")["input_ids"])}
    cut = chat.upper(model, 2)
    inputs = chat.below(model, 2, [text])[0]["inputs_embeds"][None]
    assert torch.allclose(cut(inputs_embeds=inputs).logits, model(text["input_ids"][None]).logits, atol=1e-5)
    assert len(model.model.layers) == 3
    wrong = chat.upper(model, 1)
    with pytest.raises(ValueError, match="cannot run alone"):
        chat.check_upper(model, wrong, 2, text)


def test_padding_changes_no_loss(folder):
    model, tokenizer = chat.load(str(folder), "cpu")
    writer = Chat(tokenizer, 64)
    answers = (("a?", "yes#"), ("a bc?", "no, b#"))
    short, long = (writer.answered(writer.prompt(asked), said) for asked, said in answers)
    both, has = chat.answer_losses(model, chat.collate([short, long]))
    for row, mask, one in zip(both, has, (short, long), strict=True):
        alone, counts = chat.answer_losses(model, chat.collate([one]))
        assert torch.allclose(row[mask], alone[counts], atol=1e-5)
        assert int(counts.sum()) == len(one["labels"][one["labels"] != -100])
