"""The baseline of the demo: one small head on each frozen tower, trained on the same features."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from conjoin.evaluation import Results, Table
    from conjoin.evaluation.benchmarks.emoji import EmojiScores
    from conjoin.training import CachedFeatures

STEPS, BATCH_SIZE, LEARNING_RATE, WIDTH = 150, 256, 3e-3, 256


class TwoHeads(nn.Module):
    """A two-layer head on the pooled features of each tower; image + text is the sum of both unit vectors.

    Args:
        image_width: Of the pooled image features.
        text_width: Of the pooled text features.
    """

    def __init__(self, image_width: int, text_width: int) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for size in (image_width, text_width)
        )

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Embed `(N, image_width)` and `(N, text_width)`; every view `(N, WIDTH)`, normalised."""
        views = {"image": F.normalize(self.image(image), dim=1), "text": F.normalize(self.text(text), dim=1)}
        return views | {"fused": F.normalize(views["image"] + views["text"], dim=1)}


def compare_heads(trainer: Any, processor: Any, scores: "EmojiScores", results: "Results") -> "Table":  # noqa: ANN401
    """Train the heads with GCL on the trainer's features and compare them with its model.

    Args:
        trainer: A `RetrievalTrainer` of a joint encoder, on cached features.
        processor: Of its model.
        scores: Of the model, as `evaluate_emoji` returns them.
        results: Of the model.
    """
    from conjoin.evaluation import Metric, Table, best_ranks
    from conjoin.training import CachedFeatures, cache_features

    train: CachedFeatures = trainer.train_dataset
    folder, device = Path(str(trainer.args.output_dir)).parent / "baseline", trainer.args.device
    heads = _train(train, trainer.args.seed, device)
    embedded = []
    for name, rows in (("queries", scores.queries), ("gallery", scores.candidates)):
        cached = CachedFeatures(cache_features(trainer.encoder, processor, rows, folder / name))
        image, text, text_rows = _pool(cached)
        with torch.inference_mode():
            embedded.append(heads(image[:, 0].to(device), text[text_rows[:, 0]].to(device)))
    queries, gallery = embedded
    labels = torch.arange(len(scores.queries), device=device)
    asked = (("text", "text", "hit_rate@10"), ("image", "image", "hit_rate@1"), ("image,text", "fused", "hit_rate@1"))
    found = [
        (best_ranks(queries[view], gallery["image"], labels, labels) <= int(metric.split("@")[1])).float().mean()
        for _, view, metric in asked
    ]
    cells = [results.cell(modality, "image").metrics[metric] for modality, _, metric in asked]
    names = ["text → image, R@10", "image → image, R@1", "image + text → image, R@1"]
    of_heads = [Metric(float(rate), chance=cell.chance) for rate, cell in zip(found, cells, strict=True)]
    return Table(
        "Compared with the simplest model",
        ["", "two small heads", "this model"],
        [list(row) for row in zip(names, of_heads, cells, strict=True)],
        f"One small head on each frozen tower's pooled features, trained for {STEPS} steps with the same loss on "
        "the same pictures and names. The vector of image + text is the sum of both.",
    )


def _pool(features: "CachedFeatures") -> tuple[Tensor, Tensor, Tensor]:
    """CLS and mean patch of every copy `(N, copies, 2h)`, the mean token of every text, and each row's texts."""
    image, text = features.images.column("image_features"), features.texts.column("text_features")[:, 1:].float()
    mask = features.texts.column("attention_mask").float()
    patches = image[:, :, 1:].mean(2, dtype=torch.float32)
    words = (text * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.cat([image[:, :, 0].float(), patches], dim=2), words, features.images.column("text_rows")


def _train(features: "CachedFeatures", seed: int, device: torch.device) -> TwoHeads:
    from conjoin.losses import GclLoss

    image, text, text_rows = _pool(features)
    ids = features.images.column("ids")
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        heads = TwoHeads(image.shape[2], text.shape[1]).to(device)
    loss = GclLoss(0.07, learn_temperature=False)
    optimizer = torch.optim.AdamW(heads.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    texts_of_row = (text_rows >= 0).sum(1)
    for _ in range(STEPS):
        rows = torch.randperm(len(text_rows), generator=generator)[:BATCH_SIZE]
        copies = torch.randint(image.shape[1], rows.shape, generator=generator)
        choice = (torch.rand(rows.shape, generator=generator) * texts_of_row[rows]).long()
        views = heads(image[rows, copies].to(device), text[text_rows[rows, choice]].to(device))
        terms = loss(**views, ids=ids[rows].to(device))
        optimizer.zero_grad()
        terms["gcl_loss"].backward()
        optimizer.step()
        schedule.step()
    return heads.eval()
