import pytest

from conjoin.data import emoji_concepts
from conjoin.evaluation.tasks.emoji import evaluate_emoji


def test_queries_and_gallery_need_two_artists(tmp_path):
    with pytest.raises(ValueError, match=r"both drawn by 'twemoji'"):
        evaluate_emoji(None, tmp_path, query_style="twemoji", gallery_style="twemoji")


@pytest.mark.slow
def test_queries_in_another_language(tmp_path, load_first_emoji, monkeypatch):
    def catch(encoder, tasks, *rest):
        raise RuntimeError(tasks)

    monkeypatch.setattr("conjoin.evaluation.tasks.emoji.load_emoji", load_first_emoji)
    monkeypatch.setattr("conjoin.evaluation.tasks.emoji.evaluate_tasks", catch)
    asked = {}
    for language in ("en", "de"):
        with pytest.raises(RuntimeError) as caught:
            evaluate_emoji(None, tmp_path, split="validation", language=language)
        asked[language] = next(task for task in caught.value.args[0] if task.name == "local text → text")
    german = {concept.concept: concept.text for concept in emoji_concepts("de")}
    english, task = asked["en"], asked["de"]
    for id_, right in task.qrels.items():
        assert task.queries.item(id_) == {"text": german[id_.split("/")[0]]}
        assert task.candidate(right[0]) == english.candidate(right[0])
    assert len(english.qrels) < len(task.qrels) == len(task.queries)  # also names without a second one
    with pytest.raises(ValueError, match="unknown language 'xx'"):
        evaluate_emoji(None, tmp_path, split="validation", language="xx")
