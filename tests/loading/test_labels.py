from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from lightning_gpuopt.loading.labels import Labels

GIVEN = [3, 200, 3, 0]


@pytest.fixture
def labels() -> Labels:
    return Labels(np.array(GIVEN, np.uint8))


def test_labels_are_used_as_a_list(labels: Labels) -> None:
    assert labels == GIVEN
    assert GIVEN == labels  # noqa: SIM300
    assert labels != GIVEN[:-1]
    assert labels != tuple(GIVEN)
    assert labels == pickle.loads(pickle.dumps(labels)) == Labels(np.array(GIVEN))
    assert [labels[index] for index in range(4)] == list(labels) == GIVEN
    assert {type(label) for label in (*labels, labels[0], labels[np.int64(-1)])} == {int}
    assert (labels[1:3], labels[-1], len(labels)) == ([200, 3], 0, 4)
    assert (labels.count(3), labels.index(200), 7 in labels) == (2, 1, False)
    assert Counter(labels) == {3: 2, 200: 1, 0: 1}
    assert repr(labels) == "Labels([  3, 200,   3,   0])"
    with pytest.raises(IndexError):
        labels[4]
    with pytest.raises(TypeError, match="unhashable"):
        hash(labels)


def test_arrays_and_tensors_of_labels_are_those_of_a_list(labels: Labels) -> None:
    for made in (np.array(labels), np.asarray(labels), np.asarray(Labels(np.array(GIVEN)))):
        assert (made.dtype, made.tolist(), made.flags.writeable) == (np.array(GIVEN).dtype, GIVEN, True)
    assert torch.equal(torch.tensor(labels), torch.tensor(GIVEN))
    assert np.asarray(labels, np.float32).dtype == np.float32
    assert (np.array(GIVEN) == labels).all()
    bools = Labels(np.array([True, False]))
    assert ([*bools], np.asarray(bools).dtype, torch.tensor(bools).dtype) == ([True, False], np.bool_, torch.bool)


def test_more_labels_than_are_looped_over_at_a_time() -> None:
    assert list(Labels(np.arange(10_000, dtype=np.int16))) == list(range(10_000))


def test_labels_add_up_to_lists(labels: Labels) -> None:
    one = [1]
    assert labels + one == labels + Labels(np.array(one)) == [*GIVEN, 1]
    assert one + labels == [1, *GIVEN]


def test_the_largest_labels_stay_what_they_are() -> None:
    large = Labels(np.array([2**63 + 5], np.uint64))
    assert np.asarray(large).tolist() == [*large] == [2**63 + 5]
