"""Scores of pairs of items by a `CrossEncoder` of sentence-transformers, and searches in its order."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from conjoin.data.row_images import is_interleaved
from conjoin.devices import choose_device
from conjoin.hub.folder import loading
from conjoin.processing.item_inputs import Item, parse_item
from conjoin.progress import progress
from conjoin.retrieval.results import Hit, Hits, Ranking
from conjoin.storage import settings_digest, weights_digest

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder


class Reranker:
    """Scores pairs of a query and a candidate.

    Args:
        model: A cross-encoder with one score per pair.
        batch_size: Pairs per forward pass.
        name: Of the model, for reports.

    Raises:
        ValueError: The model gives several scores per pair.
    """

    def __init__(self, model: "CrossEncoder", batch_size: int = 32, name: str = "") -> None:
        if model.num_labels != 1:
            raise ValueError(f"the reranker {name!r} gives {model.num_labels} scores per pair; expected one")
        self.model, self.batch_size, self.name = model, batch_size, name

    @property
    def fingerprint(self) -> str:
        """Equal for equal weights and settings."""
        described = [[type(module).__name__, str(module)] for module in self.model.children()]
        return settings_digest({"modules": described, "weights": weights_digest(self.model)})

    def score(
        self,
        query: Any,  # noqa: ANN401 - an item
        candidates: Sequence[Any],
        instruction: str | None = None,
        activate: bool = False,
    ) -> np.ndarray:
        """Return the score `(N,)` of each of N candidates for a query.

        Args:
            query: An item.
            candidates: Items.
            instruction: The prompt of the pairs; None for the model's own.
            activate: Apply the model's own activation, often a sigmoid, which rounds the scores of the best to 1.

        Raises:
            ValueError: An item cannot be used, or the model does not take its modality.
        """
        if not candidates:
            return np.empty(0, dtype=np.float32)
        first = _input(parse_item(query, "the query"))
        pairs = [(first, _input(parse_item(item, f"candidate {index}"))) for index, item in enumerate(candidates)]
        options: dict[str, Any] = {} if instruction is None else {"prompt": instruction}
        if not activate:
            options["activation_fn"] = torch.nn.Identity()
        try:
            predicted = self.model.predict(pairs, batch_size=self.batch_size, show_progress_bar=False, **options)
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
            raise ValueError(f"the reranker {self.name!r} cannot score these items: {error}") from error
        scores = np.asarray(predicted, dtype=np.float32).reshape(len(candidates))
        if not np.isfinite(scores).all():
            raise ValueError(f"the reranker {self.name!r} gave a score that is not finite")
        return scores


def load_reranker(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    batch_size: int = 32,
    device: str | torch.device | None = None,
) -> Reranker:
    """Load a `CrossEncoder`, of texts or of images and texts.

    Args:
        path: A local folder or the name of a repository on the Hub.
        trust_remote_code: Run the Python code that it brings.
        batch_size: Pairs per forward pass.
        device: Where to run; None takes a GPU when there is one.

    Raises:
        FileNotFoundError: There is no such model.
        ValueError: The weights are damaged, or the model is no reranker.
    """
    from sentence_transformers import CrossEncoder  # half a second

    with loading(path):
        model = CrossEncoder(str(path), device=str(choose_device(device)), trust_remote_code=trust_remote_code)
    return Reranker(model, batch_size, str(path))


def rerank(
    result: Ranking,
    queries: Sequence[Any],
    item_of: Callable[[str], Any],
    reranker: Reranker,
    top: int,
    instructions: Sequence[str | None] | None = None,
    show_progress: bool = False,
) -> Ranking:
    """Sort the first candidates of each query by the scores of a reranker; the others follow in their order.

    The scores of the first are the reranker's. Those of the others keep their differences and are moved below them.

    Args:
        result: Of Q queries.
        queries: The Q items.
        item_of: Returns the item of a candidate's id.
        reranker: Scores the pairs.
        top: Candidates of each query that are scored.
        instructions: Of the queries.
        show_progress: Show a bar.

    Raises:
        ValueError: `top` is below 1; and as `Reranker.score`.
    """
    if top < 1:
        raise ValueError(f"the number of candidates to rerank must be at least 1, got {top}")
    all_ids, all_scores = [], np.array(result.scores, dtype=np.float32)
    for row, query in enumerate(progress(queries, desc="reranking", unit="query", show=show_progress)):
        usable = np.isfinite(all_scores[row, : len(result.ids[row])])
        order = np.argsort(~usable, kind="stable")  # those that are left out go last
        ids = [result.ids[row][index] for index in order]
        others = all_scores[row, order]
        count = min(top, int(usable.sum()))
        instruction = None if instructions is None else instructions[row]
        scores = reranker.score(query, [item_of(id_) for id_ in ids[:count]], instruction)
        best = np.argsort(-scores, kind="stable")
        if count:
            others[count:] += scores.min() - 1 - others[count] if count < usable.sum() else 0.0
        others[:count] = scores[best]
        all_scores[row, : len(ids)] = others
        all_ids.append([ids[index] for index in best] + ids[count:])
    return Ranking(all_ids, all_scores)


def rerank_hits(hits: Hits, queries: Sequence[Any], reranker: Reranker, top: int) -> Hits:
    """Sort the first hits of a search as `rerank` does, with the texts and images that the collection records.

    Raises:
        ValueError: The collection knows neither the text nor the image of a result; and as `rerank`.
        FileNotFoundError: An image is no longer where it was.
    """
    rows = {hit.id: hit.row for found in hits for hit in found}

    def item_of(id_: str) -> dict[str, Any]:
        item: dict[str, Any] = {part: rows[id_][part] for part in ("image", "text") if part in rows[id_]}
        if not item:
            raise ValueError(f"the collection records neither text nor image of {id_!r}, so it cannot be reranked")
        if "text" in item and is_interleaved([None], item["text"]) and "image" in item:
            raise ValueError(f"the collection records no order of the images of {id_!r}, so it cannot be reranked")
        return item

    ranking = Ranking.join(([hit.id for hit in found], np.array([hit.score for hit in found])) for found in hits)
    again = rerank(ranking, queries, item_of, reranker, top).queries()
    found = ([Hit(id_, score, rows[id_]) for id_, score in zip(ids, scores.tolist(), strict=True)]
             for ids, scores in again)  # fmt: skip
    return Hits(found, hits.collection)


def _input(item: Item) -> Any:  # noqa: ANN401 - as sentence-transformers takes it
    images, text = item.images, " ".join(item.texts)
    if not images:
        return text
    image = images[0] if len(images) == 1 else images
    return {"image": image, "text": text} if text else image if len(images) == 1 else {"image": image}
