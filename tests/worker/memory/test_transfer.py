"""Arrays on their way to a device."""

import numpy as np
import torch

from mallee.worker.memory.transfer import packed, sent_together

PARTS = [
    np.array([[1, 2], [-3, 1 << 60]], dtype=np.int64),
    np.array([0.5, -np.inf, np.pi], dtype=np.float32),
    np.zeros((0, 5), dtype=np.int32),
    np.arange(12, dtype=np.int32).reshape(3, 4).T,
    np.array([2.5], dtype=np.float64),
]


def test_arrays_of_all_types_lie_in_one_at_aligned_places() -> None:
    whole, spans = packed(PARTS)
    for part, span in zip(PARTS, spans, strict=True):
        assert span.start % 16 == 0
        found = whole[span].numpy().view(part.dtype).reshape(part.shape)
        assert np.array_equal(found, part)


def test_what_is_sent_together_keeps_its_types_and_shapes() -> None:
    for device in ("cpu", "meta"):
        there = sent_together(PARTS, torch.device(device))
        for part, tensor in zip(PARTS, there, strict=True):
            assert tensor.dtype == torch.from_numpy(part).dtype
            assert tuple(tensor.shape) == part.shape
            assert device == "meta" or np.array_equal(tensor.numpy(), part)
    assert sent_together([], torch.device("meta")) == []
