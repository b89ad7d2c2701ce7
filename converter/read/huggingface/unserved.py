"""Outputs that a model returns by its config but that an artifact does not serve: caches, and lists of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from converter.process.quiet import quiet
from converter.read.torch.positional import left_out
from converter.source import TorchModel

CACHE = "past_key_values"
_SWITCHES = ("use_cache", "output_hidden_states", "output_attentions")


@dataclass(frozen=True)
class BasicOutputModule:
    """A transformers module that returns neither a cache nor a list of every layer's states, whatever its config says.

    ``disabled`` are the settings that were switched off: the config of the module or a part, and the setting's name.
    """

    module: torch.nn.Module
    disabled: tuple[tuple[Any, str], ...]

    @classmethod
    def of(cls, module: Any) -> BasicOutputModule:
        """Return ``module``, in which these settings are switched off in place."""
        disabled = []
        for part in module.modules():
            config = getattr(part, "config", None)
            for name in _SWITCHES:
                if getattr(config, name, False):
                    setattr(config, name, False)
                    disabled.append((config, name))
        module.config.return_dict = True
        return cls(module, tuple(disabled))

    def left_out(self, model: TorchModel) -> tuple[str, ...]:
        """Return the outputs by the original config that ``model`` does not serve, from a run on its example."""
        if not self.disabled:
            return model.left_out
        outputs: list[Any] = []
        hook = self.module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        try:
            self._switch(on=True)
            with quiet(), torch.no_grad():
                model.module(*model.example)
        except Exception:  # noqa: BLE001 - of any kind; with the settings off it works, and that is what is served
            return (*model.left_out, *sorted({f"what {name} in its config adds" for _, name in self.disabled}))
        finally:
            hook.remove()
            self._switch(on=False)
        return left_out(outputs[-1])

    def _switch(self, *, on: bool) -> None:
        for config, name in self.disabled:
            setattr(config, name, on)
