"""Images per second of `segment_patches`, compared with reclustering for every cut of Algorithm 1.

Each synthetic image has patches of a few regions with noise, so that cuts move as on real features. The two methods
take turns on the same images; a row shows medians over the turns. The script also compares the segments of both.

    python benchmarks/segment_patches.py --images 256 --patches 196 --width 768 --threads 2
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor

from conjoin.trainers.solar_masks import segment_patches


def features_of(images: int, patches: int, width: int, noise: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    regions = torch.randn(images, 12, width, generator=generator)
    counts = torch.randint(1, 13, (images, 1), generator=generator)
    owners = (torch.rand(images, patches, generator=generator) * counts).long()
    shared = noise * torch.rand(images, 1, 1, generator=generator)
    own = torch.randn(images, patches, width, generator=generator)
    return regions.gather(1, owners[..., None].expand(-1, -1, width)) + shared * own


def reclustering(features: Tensor) -> Tensor:
    """Algorithm 1 as printed: distances and tree again for every cut, one image at a time."""
    labels = []
    count = features.shape[1]
    rows, columns = torch.triu_indices(count, count, 1)
    for image in F.normalize(features, dim=-1):
        cut = 0.45
        for _ in range(5):
            distances = (1 - image @ image.T)[rows, columns].clamp(min=0).double().numpy()
            segments = torch.from_numpy(fcluster(linkage(distances, "average"), cut, "distance")) - 1
            sizes = segments.bincount()
            if sizes.max().item() / count > 0.87:
                cut -= 0.05
            elif len(sizes) > 5:
                cut += 0.05
            else:
                break
        labels.append(segments)
    return torch.stack(labels)


def timed(function: Callable[[Tensor], Tensor], features: Tensor) -> tuple[float, Tensor]:
    start = time.perf_counter()
    labels = function(features)
    return len(features) / (time.perf_counter() - start), labels


def same_partition(first: Tensor, second: Tensor) -> bool:
    """Whether two labelings `(P,)` define the same segments."""
    pairs = len(torch.stack([first, second]).unique(dim=1)[0])
    return pairs == len(first.unique()) == len(second.unique())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--patches", type=int, default=196)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--noise", type=float, default=1.6)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    features = features_of(arguments.images, arguments.patches, arguments.width, arguments.noise)
    few = features[: max(1, arguments.images // 8)]  # reclustering is slow; its rate is constant
    segment_patches(features[:8])
    turns = [(timed(segment_patches, features), timed(reclustering, few)) for _ in range(arguments.turns)]
    ours, theirs = turns[0][0][1], turns[0][1][1]
    result = {
        "segment_patches": statistics.median(turn[0][0] for turn in turns),
        "reclustering": statistics.median(turn[1][0] for turn in turns),
        "segments_per_image": (ours.amax(1) + 1).float().mean().item(),
        "same_segments": sum(map(same_partition, ours, theirs)) / len(few),
    }
    print(f"{arguments.images} images of {arguments.patches} patches x {arguments.width}, {arguments.threads} threads")
    print(f"segment_patches     {result['segment_patches']:8.0f} images/s")
    print(f"reclustering        {result['reclustering']:8.0f} images/s")
    print(f"ratio               {result['segment_patches'] / result['reclustering']:8.2f}")
    print(f"segments per image  {result['segments_per_image']:8.1f}")
    print(f"same segments       {result['same_segments']:8.1%} of {len(few)} images")
    if arguments.json:
        arguments.json.write_text(json.dumps(vars(arguments) | result, default=str, indent=2))


if __name__ == "__main__":
    main()
