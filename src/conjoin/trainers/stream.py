"""Training on a stream of pairs: which batches a process reads, and where a resumed run continues."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from conjoin.data import PairStream, SkippedFile
from conjoin.storage import write_text

if TYPE_CHECKING:
    from conjoin.trainers.base import RetrievalTrainer


class StreamTraining:
    """Connects a trainer with its stream.

    Args:
        trainer: The trainer; its configuration gives the batch size, the workers and the seed.
        stream: The training rows.
    """

    def __init__(self, trainer: "RetrievalTrainer", stream: PairStream) -> None:
        self.trainer, self.rows = trainer, stream
        self.rank, self.processes = trainer.args.process_index, trainer.args.world_size
        self.name = f"stream-{self.rank}.json"
        self.skipped = SkippedFile(str(trainer.args.output_dir), trainer.args.should_save, self.rank)
        trainer.args.ignore_data_skip = True  # the stream itself resumes

    def loader(self) -> DataLoader[Any]:
        """Return the batches of this process from the position of the stream on."""
        args = self.trainer.args
        return self.rows.loader(
            self.trainer.data_collator,
            args.per_device_train_batch_size,
            rank=self.rank,
            processes=self.processes,
            seed=args.seed,
            workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def take(self, batch: Any) -> dict[str, Any]:
        """Return the model inputs of a batch, and record that it is used."""
        inputs, mark = batch
        self.rows.advance(mark)
        self.skipped.add(mark.skipped)
        return inputs

    def save(self, checkpoint: Path) -> None:
        """Write the position of this process to a checkpoint."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        write_text(checkpoint / self.name, json.dumps({"processes": self.processes, **self.rows.position}) + "\n")

    def load(self, checkpoint: Path) -> None:
        """Continue from the position in a checkpoint.

        Raises:
            FileNotFoundError: It holds no position of this process.
            ValueError: It was written by another number of processes.
        """
        state = json.loads((checkpoint / self.name).read_text(encoding="utf-8"))
        processes = state.pop("processes")
        if processes != self.processes:
            raise ValueError(
                f"the stream was divided among {processes} processes; resume with as many, not {self.processes}"
            )
        self.rows.position = state
