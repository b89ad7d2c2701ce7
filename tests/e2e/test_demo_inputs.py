"""The demo's inputs: real sentences from the files of any Python installation, tokenised as the model requires."""

from __future__ import annotations

import minilm
import numpy as np
import pytest
from sentences import sentences


@pytest.mark.long
def test_sentences_are_distinct_complete_and_deterministic() -> None:
    found = sentences(300)
    assert len(set(found)) == 300
    assert all(sentence[0].isupper() and sentence[-1] in ".?!" for sentence in found)
    assert sentences(300)[:50] == found[:50]


@pytest.mark.long
def test_calibration_feeds_hold_one_sentence_without_padding() -> None:
    feeds = list(minilm.calibration(20))
    assert len(feeds) == 20
    for feed in feeds:
        assert {array.shape[0] for array in feed.values()} == {1}
        assert feed["attention_mask"].all()


def test_padding_does_not_change_a_pooled_embedding() -> None:
    tokens = np.random.default_rng(0).standard_normal((1, 5, 384))
    mask = np.array([[1, 1, 1, 0, 0]])
    np.testing.assert_allclose(minilm.mean_pool(tokens, mask), minilm.mean_pool(tokens[:, :3], mask[:, :3]), rtol=1e-12)
