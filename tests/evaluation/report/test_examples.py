import pytest
import torch

from conjoin.evaluation import Shown, search_examples


def test_searches_show_the_first_results_and_count_ties_against():
    gallery = [Shown(name) for name in "abcd"]
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [1.0, 1.0]])
    examples = search_examples(
        [Shown("q")] * 2, torch.tensor([[1.0, 0.0], [0.0, 3.0]]), gallery, vectors, [{0}, {1, 3}], 3, "title"
    )
    assert [example.rank for example in examples] == [2, 1]  # c is as near as a
    assert [hit.item.text for hit in examples[1].results][:2] == ["b", "d"]
    assert [hit.correct for hit in examples[1].results] == [True, True, False]
    assert {(example.gallery, example.title) for example in examples} == {(4, "title")}
    with pytest.raises(ValueError, match="gallery: 3 items are shown, but 4 embedded"):
        search_examples([Shown("q")], vectors[:1], gallery[:3], vectors, [{0}])
    with pytest.raises(ValueError, match="at least one candidate for every query"):
        search_examples([Shown("q")], vectors[:1], gallery, vectors, [set()])
