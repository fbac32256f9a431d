import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from conjoin.data import RetrievalBatchSampler

POSITIVES = [(number % 37, 100 + number % 11) if number % 3 else (number % 37,) for number in range(200)]


def test_without_shared_positives_only_the_last_rows_are_left_out(caplog):
    sampler = RetrievalBatchSampler(list(range(103)), 10)
    assert len(sampler) == 10 and len({row for batch in sampler for row in batch}) == 100
    assert "fill no batch" not in caplog.text
    RetrievalBatchSampler([0] * 60 + [*range(1, 41)], 10)  # of the 60, one to a batch
    assert "60 of 100 rows fill no batch" in caplog.text


def test_the_order_follows_seed_and_epoch():
    sampler, same = RetrievalBatchSampler(POSITIVES, 4, seed=3), RetrievalBatchSampler(POSITIVES, 4, seed=3)
    first = list(sampler)
    assert first == list(same) == list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(RetrievalBatchSampler(POSITIVES, 4, seed=4)) != first


@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_deals_steps_out_and_sets_the_epoch(processes):
    steps = []
    for process in range(processes):
        sampler = RetrievalBatchSampler(POSITIVES, 4, processes=processes)
        loader = DataLoader(torch.arange(200), batch_sampler=sampler)
        prepared = prepare_data_loader(
            loader, device=torch.device("cpu"), num_processes=processes, process_index=process, put_on_device=False
        )
        epochs = []
        for epoch in range(2):
            prepared.set_epoch(epoch)
            epochs.append(list(prepared.base_dataloader.batch_sampler))
        assert len(prepared) == len(epochs[1]) and epochs[0] != epochs[1]
        steps.append(epochs[1])
    expected = RetrievalBatchSampler(POSITIVES, 4, processes=processes)
    expected.set_epoch(1)
    assert [batch for step in zip(*steps, strict=True) for batch in step] == list(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 1, 1], 2), "3 rows do not fill a step of 2 with different positives; lower"),
        ((["x", "y"], 2, ["a", "b"]), "2 rows do not fill a step of 2 with different positives of one dataset"),
    ],
)
def test_rows_that_do_not_fill_a_step_are_counted(arguments, message):
    with pytest.raises(ValueError, match=message):
        RetrievalBatchSampler(*arguments)


def test_a_frequent_positive_takes_one_place_per_step_and_costs_little():
    positives = [("often",) if number % 2 else (number,) for number in range(20000)]
    sampler = RetrievalBatchSampler(positives, 2)
    assert len(sampler) > 9000
    assert all((a % 2) + (b % 2) <= 1 for a, b in sampler)


def test_few_candidates_shared_by_many_rows_leave_few_rows_out():
    draw = torch.Generator().manual_seed(0)
    positives = [tuple(torch.randperm(100, generator=draw)[: 1 + number % 4].tolist()) for number in range(3000)]
    batches = list(RetrievalBatchSampler(positives, 16))
    assert len(batches) > 180
    for batch in batches:
        named = [id_ for row in batch for id_ in positives[row]]
        assert len(named) == len(set(named))
