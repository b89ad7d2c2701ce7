"""Checkpoints as Lightning writes them, written without Lightning: neither their reader nor its tests need it.

``tests/sources/test_lightning.py`` tests files that Lightning itself wrote.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from architectures import Mlp, seeded

_PROGRESS = {"total": {"ready": 3, "completed": 3}, "current": {"ready": 1, "completed": 1}, "is_last_batch": True}


def state(prefix: str = "", module: torch.nn.Module | None = None, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights of ``module``, by default an ``architectures.Mlp``; each name begins with ``prefix``."""
    weights = seeded(module or Mlp(), seed).state_dict()
    return {f"{prefix}{name}": tensor.clone() for name, tensor in weights.items()}


def written(path: Path, weights: Mapping[str, Any], **more: Any) -> Path:
    """Write a file as Lightning 2.6 does after a few steps with Adam. ``more`` adds keys or replaces values."""
    moments = {i: {"step": torch.tensor(3.0), "exp_avg": tensor.clone()} for i, tensor in enumerate(weights.values())}
    checkpoint: dict[str, Any] = {
        "epoch": 2,
        "global_step": 12,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": _PROGRESS}},
        "callbacks": {
            "ModelCheckpoint{'monitor': None, 'mode': 'min', 'every_n_train_steps': 0}": {
                "best_model_score": torch.tensor(0.25),
                "best_model_path": "/somewhere/epoch=2-step=12.ckpt",
            }
        },
        "optimizer_states": [{"state": moments, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]}],
        "lr_schedulers": [],
    }
    torch.save(checkpoint | more, path)
    return path


def written_by_nano(path: Path, weights: Mapping[str, Any], **more: Any) -> Path:
    """Write a file as BigDL-Nano's Trainer does.

    It has Lightning 1.6's layout. Nano's own LightningModule contains the network (``model.``) and its loss
    (``loss.``), and stores no hyper-parameters.
    """
    network = {f"model.{name}": tensor for name, tensor in weights.items()}
    return written(
        path,
        network | {"loss.weight": torch.ones(10)},
        **{
            "pytorch-lightning_version": "1.6.4",
            "loops": {
                "fit_loop": {"state_dict": {}, "epoch_loop.state_dict": {"_batches_that_stepped": 12}},
                "validate_loop": {"state_dict": {}, "dataloader_progress": _PROGRESS},
            },
            **more,
        },
    )
