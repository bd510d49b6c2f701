"""A step's edges: random layers, evaluation, targets, tokens, errors, weights, and models without memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.comm.joining import join_group
from evener.experiments.models.transformer import Transformer
from evener.experiments.models.unet import UNet
from evener.parallel.parallel_model import Criterion
from evener.parallel.pipeline.pipeline import Pipeline
from evener.parallel.pipeline.staged import StagedModel
from evener.records.errors import InvalidInput, InvalidValue
from support.pipeline_cases import CASES, assert_equal, cost, piped, serial
from support.refusals import refused

CPU = torch.device("cpu")


def make(model: nn.Module, example: Any, stages: int, **options: Any) -> Pipeline:
    options = {"micro_batches": 3, "costs": "estimated", "loss": F.mse_loss, **options}
    return Pipeline(model, example, options.pop("loss"), on=[CPU] * stages, **options)


class Noisy(nn.Module):
    """Dropout as a module and as a function, noise, and a layer with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.inner = nn.Dropout(0.4), nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.a(x))
        y = F.dropout(self.inner(y[:, None])[:, 0], 0.2, self.training) + torch.rand_like(y)
        outputs: Tensor = self.b(self.drop(y))
        return outputs


def test_random_layers_depend_on_neither_stages_nor_recomputing() -> None:
    torch.manual_seed(0)
    model, x = Noisy().double(), torch.randn(7, 8, dtype=torch.float64)
    found = []
    for stages in (1, 2, 4):
        for policy in ("never", "always"):
            pipeline = make(copy.deepcopy(model), x, stages, rematerialise=policy)
            torch.manual_seed(5)
            losses = [float(pipeline.step(x, x)) for _ in range(2)]
            assert losses[0] != losses[1]
            gradients = dict(sorted((name, p.grad) for name, p in pipeline.named_parameters()))
            found.append((losses, torch.cat([g.flatten() for g in gradients.values() if g is not None])))
    for losses, flat in found[1:]:
        assert losses == found[0][0]
        torch.testing.assert_close(flat, found[0][1], rtol=1e-12, atol=1e-14)


def test_micro_batches_draw_different_numbers_from_a_single_seed() -> None:
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5))
    pipeline = make(model, torch.ones(4, 50), 2, micro_batches=2)
    torch.manual_seed(1)
    outputs = pipeline(torch.ones(4, 50))
    assert not torch.equal(outputs[:2], outputs[2:])
    after = torch.rand(3)
    torch.manual_seed(1)
    torch.randint(2**62, ())  # the seed that the step took
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize("name", ["residual", "branches", "transformer"])
def test_evaluation_equals_the_undivided_model(name: str) -> None:
    case = CASES[name]
    trained, pipeline = piped(case, 7, on=[CPU] * 3, micro_batches=3)
    model = case.make()
    model.load_state_dict(trained.state)
    for samples in (1, 5):
        x = case.inputs(samples)
        model.eval()
        expected = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        torch.testing.assert_close(pipeline.eval()(x), expected, rtol=1e-12, atol=1e-12)
    assert_equal(trained, piped(case, 7, on=[CPU], micro_batches=3)[0], whole=True)


def test_lone_micro_batch_equals_the_plain_model_with_statistics() -> None:
    case = CASES["residual"]
    model, x, y = case.make(), case.inputs(6), case.targets(6)
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    found, _ = piped(case, 6, steps=1, on=[CPU] * 3, micro_batches=1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found.state[name], buffer, rtol=1e-12, atol=1e-12)


def test_first_norm_has_running_statistics_of_the_whole_batch() -> None:
    case = CASES["unet"]
    model, x = case.make(), case.inputs(7)
    model(x)
    found, _ = piped(case, 7, steps=1, on=[CPU] * 2, micro_batches=4, rematerialise="always")
    for name, value in model.state_dict().items():
        if name.startswith("down.0.1.running"):
            torch.testing.assert_close(found.state[name], value, rtol=1e-12, atol=1e-12)


def test_instance_norm_statistics_move_once_for_all_micro_batches() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten()).double()
    x = torch.randn(7, 3, 5, 5, dtype=torch.float64)
    whole = copy.deepcopy(model)
    whole(x)
    pipeline = make(model, x, 2, loss=lambda outputs, _: outputs.square().mean())
    pipeline.step(x, x)
    torch.testing.assert_close(dict(pipeline.state_dict()), dict(whole.state_dict()), rtol=1e-12, atol=1e-12)


class _MovedByHand(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        with torch.no_grad():
            self.running_mean.lerp_(input.mean(0), 0.1)
        return input - input.mean(0)


def test_norm_that_updates_its_own_statistics_is_refused() -> None:
    x = torch.randn(6, 4)
    make(nn.Sequential(nn.Linear(4, 4), _MovedByHand(4)), x, 1, micro_batches=1).step(x, x)
    pipeline = make(nn.Sequential(nn.Linear(4, 4), _MovedByHand(4)), x, 1, micro_batches=2)
    with refused(InvalidInput):
        pipeline.step(x, x)


class _MovingCentre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    centre: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.centre


class _FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [_MovingCentre, _FunctionalNorm])
def test_buffers_that_change_in_every_micro_batch_are_refused(layer: Callable[[], nn.Module]) -> None:
    group = join_group(rank=0, nodes=["a"], device=CPU, store=None, patience=10)
    criterion = Criterion(loss=F.mse_loss, autocast=nullcontext, scale=lambda loss: loss)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), layer())

    def staged(micro_batches: int) -> StagedModel:
        options = {"example": torch.randn(6, 4), "costs": "estimated", "micro_batches": micro_batches}
        return StagedModel(copy.deepcopy(model), group, 0, criterion, **options)

    staged(1)
    with refused(InvalidInput):
        staged(2)


def test_comparison_detects_statistics_of_the_last_micro_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from evener.parallel.deferred_statistics import DeferredStatistics
    from evener.parallel.norm_statistics import Statistics

    collected = DeferredStatistics.collected
    monkeypatch.setattr(DeferredStatistics, "collected", lambda norm: (norm._parts[0].reverse(), collected(norm))[1])
    case = CASES["residual"]
    assert_equal(piped(case, 8, on=[CPU] * 2, micro_batches=4)[0], serial(case, 8, 4), whole=True)
    monkeypatch.setattr(DeferredStatistics, "collected", lambda norm: [Statistics(*norm._parts[0][-1])])
    with pytest.raises(AssertionError, match="running_mean is off by"):
        assert_equal(piped(case, 8, on=[CPU] * 2, micro_batches=4)[0], serial(case, 8, 4), whole=True)


def test_single_precision_agrees_to_five_digits() -> None:
    case = CASES["unet"]
    expected = serial(case, 7, 3, steps=1)
    pipeline = Pipeline(
        case.make().float(), case.inputs(7).float(), case.loss, on=[CPU] * 3, micro_batches=3, costs=cost
    )
    loss = pipeline.step(case.inputs(7).float(), case.targets(7))
    torch.testing.assert_close(loss.double(), expected.loss, rtol=1e-5, atol=1e-5)
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), expected.gradients[name], rtol=1e-5, atol=1e-5)


def test_gradients_accumulate_over_steps_with_tied_weights() -> None:
    case = CASES["tied"]
    once, _ = piped(case, 6, steps=1, on=[CPU] * 3, micro_batches=2)
    pipeline = Pipeline(case.make(), case.inputs(6), case.loss, on=[CPU] * 3, micro_batches=2, costs="estimated")
    for _ in range(3):
        pipeline.step(case.inputs(6), case.targets(6))
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, once.gradients[name] * 3)


def test_gradient_norm_over_all_stages_counts_tied_weights_once() -> None:
    case = CASES["tied"]
    model, x, y = case.make(), case.inputs(6), case.targets(6)
    case.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    pipeline = make(case.make(), x, 3, loss=case.loss)
    pipeline.step(x, y)
    assert float(pipeline.clip_gradients(0.1)) == pytest.approx(expected, rel=1e-12)
    clipped = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert float(pipeline.clip_gradients(1e9)) == pytest.approx(clipped, rel=1e-12)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, dict(model.named_parameters())[name].grad, rtol=1e-12, atol=0)


def test_state_loads_into_any_other_cut_and_the_plain_model() -> None:
    case = CASES["tied"]
    found, _ = piped(case, 6, on=[CPU] * 3, micro_batches=2)
    other = make(case.make(), case.inputs(6), 2, loss=case.loss)
    other.load_state_dict(found.state)
    model = case.make()
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(dict(model.state_dict()), found.state)
    with refused(InvalidValue):
        other.load_state_dict({name: value for name, value in found.state.items() if name != "first.bias"})


def test_unused_modules_remain_without_gradients() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.spare, self.later = (nn.Linear(3, 3) for _ in range(4))
            self.soft = nn.Softmax(1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x))
            return y if self.training else self.soft(self.later(y))  # type: ignore[no-any-return]

    model, x = Spare(), torch.randn(6, 3)
    expected = copy.deepcopy(model).eval()(x)
    pipeline = make(model, x, 2)
    pipeline.step(x, x)
    assert pipeline.state_dict().keys() == model.state_dict().keys()
    assert {name for name, p in pipeline.named_parameters() if p.grad is None} == {
        "spare.weight", "spare.bias", "later.weight", "later.bias",
    }  # fmt: skip
    torch.testing.assert_close(pipeline.eval()(x), expected)


def test_new_input_shape_is_traced_again() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            steps = torch.arange(tokens.shape[1], device=tokens.device)
            y = self.embed(tokens) * (1 + steps[None, :, None])
            return self.out(y).squeeze(2)  # type: ignore[no-any-return]

    model = Positions()
    pipeline = make(copy.deepcopy(model), torch.zeros(4, 3, dtype=torch.long), 2)
    for length in (3, 5):
        tokens = torch.arange(4 * length).view(4, length) % 9
        torch.testing.assert_close(pipeline(tokens), model(tokens))


def test_autocast_around_a_step_reaches_every_stage() -> None:
    seen: list[torch.dtype] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta:
                seen.append(x.dtype)
            return x

    model = nn.Sequential(nn.Linear(4, 4), Look(), nn.Linear(4, 4), Look())
    pipeline = Pipeline(model, torch.zeros(4, 4), F.mse_loss, stages=["2"], on=[CPU] * 2, micro_batches=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.step(torch.randn(4, 4), torch.randn(4, 4))
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in pipeline.parameters())


def test_stage_error_is_raised_and_the_next_step_works() -> None:
    class Fails(nn.Module):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken and not x.is_meta:
                raise ZeroDivisionError("of the model")
            return x

    fails = Fails()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), fails, nn.Linear(3, 3))
    pipeline = make(model, torch.zeros(6, 3), 4, micro_batches=2)
    x = torch.randn(6, 3)
    Fails.broken = True
    with pytest.raises(ZeroDivisionError, match="of the model"):
        pipeline.step(x, x)
    Fails.broken = False
    pipeline.step(x, x)
    assert pipeline.state_dict()["1.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (None, torch.zeros(4, 3), "inputs must be given on the first stage, got None"),
        (torch.zeros(4, 3), None, "targets must be given on the last stage, for the 4 samples .*, got 'none'"),
        (torch.zeros(4, 3), torch.zeros(5, 3), "for the 4 samples of the inputs, got '5 samples'"),
        (
            (torch.zeros(4, 3), torch.zeros(4)),
            torch.zeros(4, 3),
            "inputs must be 1, as in the example, got '2 tensors'",
        ),
    ],
)
def test_wrong_batches_are_refused(inputs: Any, targets: Any, message: str) -> None:
    pipeline = make(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.zeros(4, 3), 2)
    with pytest.raises(InvalidValue, match=message):
        pipeline.step(inputs, targets)


def test_recomputing_a_pass_that_changes_a_buffer_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))

        passes: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return x

    model = nn.Sequential(nn.Linear(3, 3), Counts(), nn.Linear(3, 3))
    x = torch.randn(6, 3)
    with refused(InvalidValue):
        make(model, x, 2, rematerialise="always").step(x, x)
    pipeline = make(model, x, 2, rematerialise="auto")
    pipeline.step(x, x)
    assert pipeline.state_dict()["1.passes"] == 3


def test_meta_model_is_initialised_equally_for_any_cut() -> None:
    states = []
    for stages in (1, 2, 5):
        with torch.device("meta"):
            model = Transformer(20, layers=2, dim=8, heads=2, hidden=16)
        torch.manual_seed(7)
        tokens = torch.ones(4, 3, dtype=torch.long)
        pipeline = make(model, (tokens, tokens), stages, loss=lambda y, t: y.square().mean())
        states.append(pipeline.state_dict())
        assert not any(tensor.is_meta for tensor in states[-1].values())
        pipeline.step((tokens, tokens), tokens)
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)


def test_meta_model_without_initialisation_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Bare())
    with refused(InvalidInput):
        make(model, torch.zeros(4, 3), 2)


def test_measured_costs_place_cuts_where_time_is_spent() -> None:
    class Slow(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size, size))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.weight @ self.weight).sum()

    model = nn.Sequential(*(Slow(n) for n in (8, 8, 8, 8, 400, 8)))
    pipeline = Pipeline(model, torch.zeros(4, 3), F.mse_loss, on=[CPU] * 2, micro_batches=2)
    assert pipeline.plan.division is not None
    assert [set(names) >= {"4"} for names in pipeline.plan.layout.targets].count(True) == 1
    spans = [len(names) for names in pipeline.plan.layout.targets]
    assert min(spans) <= 2  # the heavy layer, with one beside it at most, against the rest
    pipeline.step(torch.zeros(4, 3), torch.zeros(4, 3))


def test_skip_connections_reach_distant_stages() -> None:
    model = UNet(3, 2, width=4, depth=3)
    x = torch.randn(4, 3, 16, 16)
    expected = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(make(model, x, 8).eval()(x), expected)


def test_error_while_not_counting_restores_counting() -> None:
    x, norm = torch.randn(4, 3), nn.BatchNorm1d(3)
    pipeline = Pipeline(nn.Sequential(nn.Linear(3, 3), norm), x, F.mse_loss, on=[CPU], micro_batches=2)
    with pytest.raises(OSError, match="interrupted"), pipeline.uncounted():
        raise OSError("interrupted")
    pipeline.step(x, x)
    assert int(pipeline.state_dict()["1.num_batches_tracked"]) == 1
