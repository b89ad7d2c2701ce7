"""Train models with Lightning and write checkpoints and outputs; an environment with Lightning runs this file.

``python lightningtrained.py DIRECTORY`` writes ``NAME.ckpt`` for each precision and ``NAME.npz``: inputs, and the
outputs that Lightning itself computes for them from the checkpoint. ``--model lightningtrained:Lit`` is the same
module.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn


class Lit(lightning.LightningModule):  # type: ignore[misc]  # not installed where types are checked
    """x [batch, 16] → logits [batch, 4], with a normalisation and a loss that has its own weights."""

    def __init__(self, width: int = 8, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = plain(width)
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x)
        return result

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        result: torch.Tensor = self.loss(self(batch[0]), batch[1])
        return result

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams["rate"])


def plain(width: int) -> nn.Module:
    """Return the network without Lightning."""
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4))


def trainer(name: str, directory: Path) -> lightning.Trainer:
    """Return a Trainer of precision ``name``; ``16-mixed`` gets a scaler, which a Trainer on a CPU leaves out."""
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    chosen: dict[str, Any] = {"plugins": scaled} if name == "16-mixed" else {"precision": name.partition("+")[0]}
    return lightning.Trainer(
        **chosen,
        callbacks=[EMAWeightAveraging(decay=0.5)] if name.endswith("+ema") else [],
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )


class Saving(lightning.Callback):  # type: ignore[misc]
    """Saves during training: only then does the file contain the state of callbacks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def main(directory: Path) -> None:
    """Write a checkpoint and Lightning's outputs for each precision."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(64, 16)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), 16)
    for name in ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "32-true+ema"):
        path = directory / f"{name}.ckpt"
        one = trainer(name, directory)
        one.callbacks.append(Saving(path))
        one.fit(Lit(width=32), data)
        loaded = Lit.load_from_checkpoint(path, map_location="cpu").float().eval()
        with torch.no_grad():
            np.savez(directory / f"{name}.npz", x=x.numpy(), logits=loaded(x).numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
