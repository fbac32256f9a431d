"""A tiny joint encoder and its training data, used by the tests and by the ranks they start."""

import copy
import functools

import torch
import yaml
from datasets import Dataset, Features, Image, Value
from PIL import Image as PilImage

from conjoin import (
    ContrastiveConfig,
    ContrastiveTrainer,
    GclConfig,
    GclTrainer,
    JointEncoderModel,
    QueryContrastiveTrainer,
)
from conjoin.hub.build import image_text_processor, towers_model
from conjoin.trainers.gradient_cache import cached_backward, total_loss

FEATURES = Features({"id": Value("string"), "group": Value("string"), "image": Image(), "text": Value("string")})
METHODS = {
    "contrastive": (ContrastiveConfig, ContrastiveTrainer),
    "queries": (ContrastiveConfig, QueryContrastiveTrainer),
    "gcl": (GclConfig, GclTrainer),
}

SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
}


def small_run(out, **more):
    """Words of `conjoin train` that make the run of any recipe small."""
    settings = SETTINGS | {"output_dir": out, "dataloader_num_workers": 0, "warmup_steps": 0} | more
    return [f"--{key}={value}" for key, value in settings.items()]


def write_recipe(folder, checkpoints, trainer, rows, **values):
    """Write a recipe of a joint encoder on a CPU; returns its path.

    Args:
        folder: Where to write it; the model goes to `out` in it.
        checkpoints: Of tiny backbones.
        trainer: Key of the trainer.
        rows: `dataset_name`.
        values: Further keys, or other values of these.
    """
    towers = {
        f"{tower}_model_name_or_path": checkpoints[kind] for tower, kind in (("vision", "dinov2"), ("text", "bert"))
    }
    config = {"hidden_size": 16, "num_attention_heads": 2}
    recipe = {"trainer": trainer, "model_type": "joint_encoder", **towers, "model_init_kwargs": config}
    recipe |= {"dataset_name": str(rows), "output_dir": str(folder / "out"), "use_cpu": True, "disable_tqdm": True}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | values))
    return folder / "recipe.yaml"


def built_once(build):
    """Build for given arguments once, and copy; the random state is that after building."""
    known = {}

    @functools.wraps(build)
    def copied(*args, **kwargs):
        key = repr((args, sorted(kwargs.items())))
        if key not in known:
            known[key] = build(*args, **kwargs), torch.get_rng_state()
        built, state = known[key]
        torch.set_rng_state(state)
        return copy.deepcopy(built)

    return copied


@built_once
def make_encoder(checkpoints, vision="dinov2", text="bert", **config):
    torch.manual_seed(0)
    settings = {"hidden_size": 16, "num_attention_heads": 2} | config
    model = towers_model(JointEncoderModel, checkpoints[vision], checkpoints[text], **settings)
    return model, image_text_processor(checkpoints[vision], checkpoints[text])


def make_rows(count, groups=None):
    """Rows that differ in colour and text."""
    return Dataset.from_list(
        [
            {
                "id": f"row{i}",
                "group": f"g{i % (groups or count)}",
                "image": PilImage.new("RGB", (16, 16), (40 * i % 256, 90 * i % 256, 255 - 30 * i % 256)),
                "text": f"{chr(97 + i % 26)} {i}",
            }
            for i in range(count)
        ],
        features=FEATURES,
    )


def write_pairs(folder, count):
    """A folder of pictures, each with its text beside it."""
    folder.mkdir()
    for row in make_rows(count):
        row["image"].save(folder / f"{row['id']}.png")
        (folder / f"{row['id']}.txt").write_text(row["text"])


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _gradients(objective):
    found = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    objective.zero_grad()
    return found


def plain_step(objective, batch):
    """The terms of a batch and the gradients, by name."""
    terms = objective(**batch)
    total_loss(terms).backward()
    return terms, _gradients(objective)


def cached_step(objective, batch, chunk_size, **options):
    """The same in chunks, by the gradient cache."""
    terms = cached_backward(objective, dict(batch), chunk_size, lambda loss: loss.backward(), **options)
    return terms, _gradients(objective)


def hit_rates(trainer, rows=None):
    """What `evaluate` measures of the embeddings."""
    return {name: value for name, value in trainer.evaluate(rows).items() if "hit_rate" in name}


def make_trainer(
    method, model, processor, folder, rows, eval_rows=None, methods=METHODS, peft_config=None, **arguments
):
    config_class, trainer_class = methods[method]
    config = config_class(**(SETTINGS | {"output_dir": str(folder)} | arguments))
    more = {} if peft_config is None else {"peft_config": peft_config}
    return trainer_class(model, config, train_dataset=rows, eval_dataset=eval_rows, processing_class=processor, **more)
