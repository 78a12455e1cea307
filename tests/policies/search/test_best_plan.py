"""The search equals brute force, for one pool and several, in either objective, and proposes only what fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.models.devices import device
from libra_hpc.models.memory import memory_limit
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.models.train_seconds import TrainCost
from libra_hpc.models.update_time import UpdateTime
from libra_hpc.policies.costs.lengths import BatchWork
from libra_hpc.policies.costs.rollout_time import ReplicaCost
from libra_hpc.policies.search import best_plan as search_module
from libra_hpc.policies.search import node_count, train_layout
from libra_hpc.policies.search.best_plan import PlanSearch
from libra_hpc.policies.search.even_rollout_layout import EvenRolloutSearch
from libra_hpc.policies.search.rollout_layout import ReplicaClass, RolloutLayout, RolloutSearch, assign
from libra_hpc.policies.search.run_plan import DevicePool
from libra_hpc.policies.search.train_layout import ROUNDING, Hybrid, TrainSearch, TrainSpace
from tests.policies.control.plant_costs import A800, QWEN, FakeSteps, agentic, batch_of, costs, fake

SMALL = TrainSpace(tp=(1, 2, 4, 8), pp=(1, 2), cp=(1,))


def counts(classes: Sequence[ReplicaClass], devices: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every number of replicas per class within the devices of each pool."""
    for chosen in itertools.product(*(range(devices[c.pool] // c.tp + 1) for c in classes)):
        used = [0] * len(devices)
        for cost, n in zip(classes, chosen, strict=True):
            used[cost.pool] += n * cost.tp
        if all(u <= have for u, have in zip(used, devices, strict=True)):
            yield chosen


def brute(classes: Sequence[ReplicaClass], devices: Sequence[int], bins: int) -> float:
    """Least seconds over every multiset of TP degrees and every cut of the lengths."""
    found = (assign(classes, chosen, bins) for chosen in counts(classes, devices))
    return min((layout.seconds for layout in found if layout is not None), default=math.inf)


def cuts(classes: Sequence[ReplicaClass], chosen: Sequence[int], bins: int) -> float:
    """Least seconds over every way to cut the lengths, longest to the fastest class."""
    able = sorted(
        (i for i in range(len(classes)) if chosen[i]), key=lambda i: (classes[i].replica.latency, classes[i].tp)
    )
    best = math.inf
    for inner in itertools.combinations_with_replacement(range(bins + 1), len(able) - 1):
        edges = [bins, *reversed(inner), 0]
        parts = [
            classes[i].replica.time(low, high - 1, chosen[i])
            for i, high, low in zip(able, edges, edges[1:], strict=False)
            if high > low
        ]
        best = min(best, max(parts))
    return best


@st.composite
def batches(draw: st.DrawFn, etas: int = 1) -> BatchWork:
    """Up to six trajectories."""
    return batch_of(*draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=6)), eta=draw(st.integers(0, etas)))


Term = tuple[float, float, float, float]
terms = st.tuples(st.floats(0.001, 0.05), st.floats(0.0, 0.01), st.floats(0.0, 1e-6), st.floats(0.1, 1.0))


def made(batch: BatchWork, term: Term, tps: Sequence[int], capacity: int = 10**7) -> list[ReplicaClass]:
    fixed, each, kv, scaling = term
    terms = {"fixed": fixed, "each": each, "kv": kv, "new": 1e-5, "scaling": scaling}
    return costs(batch, *(FakeSteps(tp=tp, capacity=capacity * tp, **terms) for tp in tps))


def searched(batch: BatchWork, classes: Sequence[ReplicaClass]) -> RolloutSearch:
    return RolloutSearch(classes, len(batch.lengths.bins))


def best(batch: BatchWork, classes: Sequence[ReplicaClass], *devices: int) -> RolloutLayout:
    return searched(batch, classes).best(devices)


@settings(max_examples=40)
@given(batches(2), terms, st.integers(0, 12), st.sampled_from([5_000, 21_000, 10**7]))
def test_rollout_layouts_equal_brute_force(batch: BatchWork, term: Term, devices: int, capacity: int) -> None:
    bins = len(batch.lengths.bins)
    classes = made(batch, term, (1, 2, 4), capacity)
    found = searched(batch, classes).best([devices]) if any(c.replica.limit() is None for c in classes) else None
    wanted = brute(classes, [devices], bins)
    if found is None:
        assert wanted == math.inf
        return
    assert found.seconds == pytest.approx(wanted, rel=1e-6)
    assert found.devices(0) <= devices
    assert sorted(q for s in found.segments for q in range(s.first, s.last + 1)) == list(range(bins))


@settings(max_examples=20)
@given(batches(), terms, terms, st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_two_pools_equal_brute_force(batch: BatchWork, one: Term, other: Term, devices: tuple[int, int]) -> None:
    classes = made(batch, one, (1, 2)) + [msgspec.structs.replace(c, pool=1) for c in made(batch, other, (1, 2))]
    wanted = brute(classes, devices, len(batch.lengths.bins))
    assert best(batch, classes, *devices).seconds == pytest.approx(wanted, rel=1e-6)


@settings(max_examples=40)
@given(batches(), terms, st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)))
def test_given_counts_are_cut_in_the_best_places(batch: BatchWork, term: Term, chosen: tuple[int, int, int]) -> None:
    classes, bins = made(batch, term, (1, 2, 4)), len(batch.lengths.bins)
    found = assign(classes, chosen, bins)
    assert (found is None) is (not any(chosen))
    if found is not None:
        assert found.seconds == pytest.approx(cuts(classes, chosen, bins))


@settings(max_examples=30)
@given(batches(2), terms, st.integers(1, 24))
def test_more_devices_never_roll_out_slower_and_none_beats_the_straggler(
    batch: BatchWork, term: Term, devices: int
) -> None:
    classes = made(batch, term, (1, 2, 4, 8))
    few, more = (best(batch, classes, n).seconds for n in (devices, devices + 1))
    assert searched(batch, classes).straggler() / (1 + 1e-9) <= more <= few * (1 + 1e-9)


def test_steps_shared_with_shorter_contexts_do_not_beat_the_straggler() -> None:
    """Short trajectories beside the longest lower the mean context of its steps; with many nodes that once beat the
    bound."""
    batch = batch_of(*([2_000] * 63), 20_000, eta=1)
    classes = costs(batch, FakeSteps(tp=1, capacity=10**9, fixed=0.01, each=0.0, kv=1e-5))
    assert searched(batch, classes).straggler() <= best(batch, classes, 10_000).seconds


def test_long_trajectories_go_to_large_tp() -> None:
    batch = agentic(512)
    classes = [ReplicaClass(0, ReplicaCost(lookup(A800, QWEN, tp), batch)) for tp in (1, 2, 4, 8)]
    segments = best(batch, classes, 32).segments
    degrees = [s.tp for s in segments]
    assert len(degrees) > 1
    assert degrees == sorted(degrees, reverse=True)
    assert [s.last for s in segments] == sorted((s.last for s in segments), reverse=True)


@given(batches(), terms, st.integers(8, 16))
def test_without_foresight_one_class_is_best(batch: BatchWork, term: Term, devices: int) -> None:
    bins = len(batch.lengths.bins)
    classes = made(batch, term, (1, 2, 4, 8))
    found = EvenRolloutSearch(classes, bins).best([devices])
    assert found.seconds == pytest.approx(min(c.replica.time(0, bins - 1, devices // c.tp) for c in classes), rel=1e-6)
    assert best(batch, classes, devices).seconds <= found.seconds * (1 + 1e-6)


def test_without_foresight_two_pools_share_by_speed() -> None:
    batch = batch_of(*[1000] * 16, eta=1)
    bins = len(batch.lengths.bins)
    slow, fast = (made(batch, (0.001, each, 0.0, 1.0), (1,))[0] for each in (0.01, 0.002))
    classes = [slow, msgspec.structs.replace(fast, pool=1)]
    together = 1 / sum(1 / c.replica.time(0, bins - 1, 1) for c in classes)
    assert EvenRolloutSearch(classes, bins).best([1, 1]).seconds == pytest.approx(together, rel=0.1)


def whole(
    batch: BatchWork, pools: Sequence[DevicePool], keep: int = 1, sorted_lengths: bool = True
) -> search_module.PlanResult:
    return PlanSearch(QWEN, pools, batch, space=SMALL, steps=fake, sorted_lengths=sorted_lengths).run(keep)


def enumerated(
    batch: BatchWork,
    pools: Sequence[DevicePool],
    sorted_lengths: bool = True,
    shape: ModelShape = QWEN,
    space: TrainSpace = SMALL,
    steps: Callable[..., StepTimes] = fake,
) -> float:
    """Least seconds over every number of training nodes, with both stages searched to the end."""
    kind = RolloutSearch if sorted_lengths else EvenRolloutSearch
    bins = len(batch.lengths.bins)
    degrees = [tp for tp in (1, 2, 4, 8) if shape.divides(tp)]
    classes = [
        ReplicaClass(i, ReplicaCost(steps(p.device, shape, tp), batch)) for i, p in enumerate(pools) for tp in degrees
    ]
    found = [math.inf]
    for i, pool in enumerate(pools):
        trainer = TrainCost(shape, pool.device, pool.node_devices, batch.training)
        layouts = TrainSearch(trainer, pool.node_devices, space)
        for n in range(1, pool.nodes + 1):
            rest = [(p.nodes - (n if k == i else 0)) * p.node_devices for k, p in enumerate(pools)]
            fits = (one for one in layouts.candidates(n * pool.node_devices) if trainer.limit(one) is None)
            train = min((trainer.time(one).total for one in fits), default=math.inf)
            layout = kind(classes, bins).best(rest, lag=train if batch.eta else 0.0) if train < math.inf else None
            if layout is not None:
                found.append(max(train, layout.seconds) if batch.eta else train + layout.seconds)
    return min(found)


@pytest.mark.parametrize("eta", [0, 1, 3])
@pytest.mark.parametrize("nodes", [2, 5, 17, 24])
@pytest.mark.parametrize(("trajectories", "sorted_lengths"), [(24, True), (512, True), (512, False)])
def test_the_plan_equals_enumeration(
    eta: int, nodes: int, trajectories: int, sorted_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds are in use from the smallest size on, and bounds are closed completely."""
    monkeypatch.setattr(search_module, "ENUMERATED", 0)
    monkeypatch.setattr(node_count, "GAP", 0.0)
    batch, pools = agentic(trajectories, eta), [DevicePool(A800, nodes, 8)]
    result = whole(batch, pools, sorted_lengths=sorted_lengths)
    assert result.plans[0].seconds == pytest.approx(enumerated(batch, pools, sorted_lengths), rel=1e-6)
    assert result.gap < 1e-6


@pytest.mark.parametrize("eta", [0, 1])
@pytest.mark.parametrize("nodes", [3, 6])
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_every_training_layout_and_engine_degree_was_compared(name: str, nodes: int, eta: int) -> None:
    """Dense models and mixtures of experts, with every degree of parallelism and the tabulated step times."""
    shape, batch, pools = model_shape(name), agentic(256, eta), [DevicePool(A800, nodes, 8)]
    wanted = enumerated(batch, pools, sorted_lengths=False, shape=shape, space=TrainSpace(), steps=lookup)
    assert PlanSearch(shape, pools, batch).run().plans[0].seconds == pytest.approx(wanted, rel=ROUNDING)


def test_of_layouts_as_fast_as_each_other_the_one_with_fewer_context_ranks_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_layout, "ROUNDING", 0.1)
    cost = TrainCost(model_shape("qwen3-30b-a3b"), A800, 8, agentic(256).training)
    search = TrainSearch(cost, 8)
    able = {one: cost.time(one).total for one in search.candidates(16) if cost.limit(one) is None}
    fastest, best = min(able, key=able.__getitem__), search.best(16)
    assert best.layout.cp < fastest.cp
    equal = {one: seconds for one, seconds in able.items() if seconds <= able[fastest] * 1.1}
    fewest = min(one.cp for one in equal)
    assert best.time.total == min(seconds for one, seconds in equal.items() if one.cp == fewest)


@pytest.mark.parametrize("eta", [0, 1])
def test_mixed_components_equal_enumeration(eta: int) -> None:
    batch = agentic(128, eta)
    pools = [DevicePool(A800, 3, 8), DevicePool(device("h100"), 2, 8)]
    result = whole(batch, pools, keep=9)
    assert result.plans[0].seconds == pytest.approx(enumerated(batch, pools), rel=1e-6)
    assert {p.pool for p in result.plans} == {0, 1}


@pytest.mark.parametrize("eta", [0, 1])
def test_a_bound_that_is_not_closed_is_reported(eta: int) -> None:
    batch, pools = agentic(512, eta), [DevicePool(A800, 40, 8)]
    result = whole(batch, pools)
    assert result.bound <= enumerated(batch, pools) * (1 + 1e-6) <= result.plans[0].seconds * (1 + 1e-6) ** 2
    assert result.gap <= node_count.GAP


def test_plans_use_every_node_and_fit() -> None:
    result = whole(agentic(), [DevicePool(A800, 6, 8)], keep=5)
    assert result.plans
    for p in result.plans:
        assert p.train.layout.devices == p.nodes * 8
        assert p.rollout.devices(0) <= (6 - p.nodes) * 8
        assert memory_limit(p.train.memory, A800) is None
        assert p.seconds == max(p.train.time.total, p.rollout.seconds)
    assert [p.seconds for p in result.plans] == sorted(p.seconds for p in result.plans)
    assert any("GB over" in e.limit.reason for e in result.excluded)


def test_one_search_serves_several_sizes() -> None:
    batch = agentic()
    shared = PlanSearch(QWEN, [DevicePool(A800, 9, 8)], batch, space=SMALL, steps=fake, sorted_lengths=True)
    for nodes in (2, 5, 9):
        assert shared.run(1, [nodes]).plans[0].seconds == whole(batch, [DevicePool(A800, nodes, 8)]).plans[0].seconds


@pytest.mark.parametrize("nodes", [6, 20])
@pytest.mark.parametrize("eta", [0, 1])
def test_new_weights_take_the_trainers_the_engines_and_without_staleness_the_way_between(eta: int, nodes: int) -> None:
    batch, pools = agentic(eta=eta), [DevicePool(A800, nodes, 8)]
    update = UpdateTime(diff_s=800.0, wire_s=30.0, stage_s=80.0, pause_s=16.0)
    result = PlanSearch(QWEN, pools, batch, space=SMALL, steps=fake, update=update).run(nodes)
    plain = PlanSearch(QWEN, pools, batch, space=SMALL, steps=fake).run(nodes)
    assert result.plans[0].seconds > plain.plans[0].seconds
    for p in result.plans:
        tp, train = min(s.tp for s in p.rollout.segments), p.train.time.total + 800.0 / (8 * p.nodes)
        rollout = p.rollout.seconds + 16.0 / tp
        alone = train + 30.0 + 80.0 / tp + rollout
        assert p.seconds == pytest.approx(max(train, rollout) if eta else alone)
    assert result.bound <= result.plans[0].seconds


def test_nothing_fits() -> None:
    training = "No training layout fits beside a rollout node; nearest: training TP8·PP2·DP1, recomputed, .* GB over"
    rollout = (
        r"No rollout layout holds trajectories of 32,76\d tokens; nearest: rollout TP8 on a800, its KV cache holds"
        r" 8,000 tokens"
    )
    for model, nodes, capacity, why in (
        ("llama-3.1-70b", 3, 60_000, training),
        ("qwen3-14b", 3, 1000, rollout),
        ("qwen3-14b", 1, 60_000, "at least 2 nodes"),
    ):
        search = PlanSearch(
            model_shape(model),
            [DevicePool(A800, nodes, 8)],
            agentic(),
            space=SMALL,
            steps=lambda device, shape, tp, most=capacity: FakeSteps(tp, most * tp),
        )
        with pytest.raises(UserError, match=why):
            search.run()


@pytest.mark.parametrize(
    ("hybrid", "names"),
    [
        (Hybrid(), "qwen3-14b"),
        (Hybrid(2), "qwen3-14b"),
        (Hybrid(3, world=2), "qwen3-32b"),
        (Hybrid(rest=True), "qwen3-14b"),
        (Hybrid(2), "llama-3.1-70b"),
    ],
)
def test_hybrid_nodes_are_whole_replicas_that_fit_without_the_core(hybrid: Hybrid, names: str) -> None:
    shape, batch = model_shape(names), agentic(64)
    trainer = TrainCost(shape, A800, 8, batch.training)
    search = TrainSearch(trainer, 8)
    found = PlanSearch(shape, [DevicePool(A800, 6, 8)], batch, steps=fake, hybrid=hybrid).run(9)
    assert found.plans
    for row in found.plans:
        wanted = hybrid.nodes(6 - row.nodes)
        able = []
        for one in search.candidates(8 * row.nodes):
            own = msgspec.structs.replace(one, dp=8 * hybrid.world // one.replica, elastic=True)
            beside = search.runs_beside(one, hybrid.world) and trainer.limit(own) is None
            if trainer.limit(one) is None and (beside or not row.hybrid):
                able.append(trainer.time(one).total)
        assert row.train.time.total == pytest.approx(min(able), rel=ROUNDING)
        assert row.hybrid in (0, wanted)
        assert row.hybrid % hybrid.world == 0
    some = bool(hybrid.most or hybrid.rest) and names != "llama-3.1-70b"
    assert any(row.hybrid for row in found.plans) is some
