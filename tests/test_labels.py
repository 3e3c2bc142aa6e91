"""The summed loss: what it is for given labels, and what sampled labels are drawn from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from eigendamage.labels import IGNORED, Loss, Uniforms, summed_loss


def loss_of(
    outputs: Tensor,
    targets: object = None,
    labels: str = "given",
    task: str = "classification",
    loss: Loss | None = None,
    seed: int = 0,
) -> Tensor:
    return summed_loss(outputs, targets, labels, task, loss, Uniforms(seed))


def sampled(logits: Tensor, seed: int = 0, targets: Tensor | None = None) -> Tensor:
    """The classes that were drawn, read from the gradient of the loss: softmax minus one at the class; -1 where none was."""
    logits = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(logits, targets, "sampled", seed=seed), logits)
    drawn = (logits.softmax(-1) - gradient).round(decimals=6)
    return torch.where(gradient.any(-1), drawn.argmax(-1), -1)


@given(st.lists(st.integers(0, 6000), min_size=1, max_size=6), st.integers(0, 100))
def test_uniform_numbers_do_not_depend_on_how_many_are_taken_at_a_time(counts: list[int], seed: int) -> None:
    stream, whole = Uniforms(seed), Uniforms(seed).take(sum(counts))
    assert torch.equal(torch.cat([stream.take(count) for count in counts]), whole)
    assert ((whole >= 0) & (whole < 1)).all()


def test_uniform_numbers_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    Uniforms(3).take(10_000)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(6, 4), (6, 5, 4), (6, 2, 5, 4)])
def test_classes_may_be_the_last_dimension(shape: tuple[int, ...]) -> None:
    outputs, targets = torch.randn(shape), torch.randint(4, shape[:-1])
    targets.view(-1)[1] = IGNORED
    expected = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss_of(outputs, targets), expected)


@pytest.mark.parametrize("shape", [(6, 4, 5), (6, 4, 5, 3), (6, 4, 2, 5, 3)])
def test_classes_may_be_the_second_dimension(shape: tuple[int, ...]) -> None:
    outputs, targets = torch.randn(shape), torch.randint(4, (shape[0], *shape[2:]))
    targets.view(-1)[1] = IGNORED
    torch.testing.assert_close(loss_of(outputs, targets), F.cross_entropy(outputs, targets, reduction="sum"))


def test_sampled_classes_come_as_often_as_the_model_says() -> None:
    logits = torch.randn(3, 5)
    drawn = sampled(logits.repeat_interleave(20_000, 0)).view(3, -1)
    frequencies = torch.stack([torch.bincount(row, minlength=5) for row in drawn]) / drawn.shape[1]
    torch.testing.assert_close(frequencies, logits.softmax(-1), rtol=0, atol=0.012)


@given(st.integers(0, 100), st.integers(1, 9))
def test_sampled_classes_do_not_depend_on_the_batch_size(seed: int, size: int) -> None:
    logits, uniforms = torch.randn(9, 4, dtype=torch.float64), Uniforms(seed)
    parts = [summed_loss(part, None, "sampled", "classification", None, uniforms) for part in logits.split(size)]
    torch.testing.assert_close(torch.stack(parts).sum(), loss_of(logits, labels="sampled", seed=seed))


def test_a_certain_model_is_believed() -> None:
    certain = torch.tensor([[0.0, 1e4, 0.0], [-1e4, -2e4, 0.0]])
    assert sampled(certain.repeat(50, 1), seed=7).eq(-1).all()  # at a certain class the gradient is nothing


def test_no_class_is_sampled_where_no_target_counts() -> None:
    logits, targets = torch.randn(50, 4), torch.randint(4, (50,))
    targets[::3] = IGNORED
    drawn = sampled(logits, targets=targets)
    assert torch.equal(drawn == -1, targets == IGNORED)
    assert torch.equal(drawn[1::3], sampled(logits)[1::3])


def test_sampled_regression_targets_have_unit_variance() -> None:
    outputs = torch.randn(400, 50, dtype=torch.float64).requires_grad_()
    (noise,) = torch.autograd.grad(loss_of(outputs, None, "sampled", "regression"), outputs)
    assert abs(float(noise.mean())) < 0.03
    assert abs(float(noise.var()) - 1) < 0.05
    assert abs(float(noise.pow(4).mean()) - 3) < 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_losses_are_summed_in_single_precision_or_better(dtype: torch.dtype, task: str) -> None:
    outputs = torch.randn(6, 4, dtype=dtype)
    targets = torch.randint(4, (6,)) if task == "classification" else torch.randn(6, 4, dtype=dtype)
    assert loss_of(outputs, targets, task=task).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_mean_loss_and_its_values_are_the_same() -> None:
    outputs, targets = torch.randn(6, 4), torch.randint(4, (6,))
    expected = F.cross_entropy(outputs, targets, reduction="sum")
    for reduction in ("mean", "none"):
        torch.testing.assert_close(
            loss_of(outputs, targets, loss=lambda *pair, r=reduction: F.cross_entropy(*pair, reduction=r)), expected
        )
