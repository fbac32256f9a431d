import pytest

from conjoin.evaluation.benchmarks.emoji import evaluate_emoji


def test_queries_and_gallery_need_two_artists(tmp_path):
    with pytest.raises(ValueError, match=r"both drawn by 'noto'"):
        evaluate_emoji(None, tmp_path, query_style="noto", gallery_style="noto")
