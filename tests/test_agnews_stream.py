"""The stream: priors, disjoint rows, a fixed split, and an order that depends on the seed."""

from collections import Counter

import pytest

from examples.lora_agnews import stream
from examples.lora_agnews.data import DataError

ROWS = 50
TEXTS = tuple(f"article {label} {k}" for label in range(4) for k in range(100))
LABELS = tuple(label for label in range(4) for _ in range(100))


@pytest.fixture(scope="module")
def experiences():
    return stream.build(TEXTS, LABELS, experiences=5, rows=ROWS, dominant_share=0.7)


def everything(experience):
    return experience.train.texts + experience.test.texts


def test_no_row_is_used_twice(experiences):
    used = [text for experience in experiences for text in everything(experience)]
    assert len(used) == len(set(used)) == 5 * ROWS


def test_labels_stay_with_their_texts(experiences):
    for experience in experiences:
        for split in (experience.train, experience.test):
            assert all(
                text.split()[1] == str(label) for text, label in zip(split.texts, split.labels, strict=True)
            )


def test_each_experience_has_its_dominant_class_and_shares_the_rest(experiences):
    for k, experience in enumerate(experiences):
        counts = Counter(experience.train.labels + experience.test.labels)
        assert counts[k % 4] == 35
        assert sorted(counts[label] for label in range(4) if label != k % 4) == [5, 5, 5]


@pytest.mark.parametrize("share", [0.1, 0.33, 0.5, 0.9])
@pytest.mark.parametrize("rows", [7, 40, 101])
def test_rows_needed_add_up(share, rows):
    for counts in stream.rows_needed(4, rows, share):
        assert sum(counts) == rows
        assert min(counts) >= 0


def test_split_is_80_20_and_the_same_every_time(experiences):
    assert all((len(e.train.texts), len(e.test.texts)) == (40, 10) for e in experiences)
    again = stream.build(TEXTS, LABELS, experiences=5, rows=ROWS, dominant_share=0.7)
    assert again == experiences
    assert stream.fingerprint(again) == stream.fingerprint(experiences)


def test_fingerprint_sees_where_a_row_is(experiences):
    first, *rest = experiences
    swapped = stream.Experience(first.name, first.test, first.train)
    assert stream.fingerprint([swapped, *rest]) != stream.fingerprint(experiences)


def test_order_depends_on_the_seed_only():
    orders = {seed: stream.order(3, seed) for seed in (0, 2, 5, 7, 11)}
    assert all(sorted(order) == [0, 1, 2] for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) > 1
    assert stream.order(3, 2) == orders[2]


def test_training_texts_are_all_of_the_training_rows_and_nothing_else(experiences):
    texts = set(stream.training_texts(experiences))
    assert texts == {text for e in experiences for text in e.train.texts}
    assert not texts & {text for e in experiences for text in e.test.texts}


def test_an_article_that_comes_twice_is_used_once():
    experiences = stream.build(TEXTS + TEXTS, LABELS + LABELS, experiences=4, rows=100, dominant_share=0.7)
    used = [text for experience in experiences for text in everything(experience)]
    assert len(used) == len(set(used))


def test_too_few_rows_say_how_many_of_each_class():
    with pytest.raises(DataError, match=r"World 110 needed, 100 found; .*; Sci/Tech 30 needed, 100 found"):
        stream.build(TEXTS, LABELS, experiences=3, rows=120, dominant_share=0.75)
