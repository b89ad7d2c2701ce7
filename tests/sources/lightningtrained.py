"""Run by an environment that has Lightning: ``python lightningtrained.py DIRECTORY`` trains and answers.

Writes ``NAME.ckpt`` for each precision and ``NAME.npz``: inputs, and what Lightning itself answers to them from the
checkpoint. ``--model lightningtrained:Lit`` is the same module.
"""

from __future__ import annotations

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
    """x [batch, 16] → logits [batch, 4], with a normalisation and a loss that has weights of its own."""

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
    """The network without Lightning."""
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4))


def trainer(name: str, directory: Path) -> lightning.Trainer:
    """One whose precision is ``name``; ``16-mixed`` with a scaler, which a CPU's Trainer leaves out by itself."""
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
    """Saves while training lasts: what callbacks keep is in the file only then."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def main(directory: Path) -> None:
    """A checkpoint and Lightning's answers for each precision."""
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
