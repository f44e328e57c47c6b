"""The torch module of a model of the transformers library with a strategy."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from sparsebench.deploy.sparse_model import SparseModel
from sparsebench.errors import UserError
from sparsebench.models.actor import Actor
from sparsebench.models.deep import DeepViT
from sparsebench.models.transformers_models import Converted


class SparseTransformer(SparseModel):
    """A model of the transformers library with a strategy: called and saved like the model.

    The network is the same network of timm with a copy of the weights, and `state_dict()` has timm's names. `remove`
    and `save_pretrained` copy the weights back.

    Attributes:
        model: the timm network.
        spec: see `SparseModel`.
        converted: the transformers model with its timm network.
    """

    def __init__(self, network: DeepViT, actor: Actor, spec: str, converted: Converted):
        super().__init__(network, actor, spec)
        # Not a submodule: its weights are those before the training.
        object.__setattr__(self, "converted", converted)

    converted: Converted

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        """Return the output of the model: the same class with the same fields.

        `last_hidden_state` has the (B, P + M, C) tokens that remain, in the order of `forward_features`.

        Args:
            pixel_values: (B, channels, height, width) pixels, normalised as for the model.
            labels: (B,) class numbers, for a model with logits. The output then has the model's loss, in training with
                the strategy's own loss added.
        """
        acting = self._begin(pixel_values)
        network: Any = self._network
        if self._acts:
            tokens = network.features(pixel_values, acting, lambda: network.restore(pixel_values))
            head = network.head(tokens, acting)
        else:
            tokens = network.module.forward_features(pixel_values)
            head = network.module.forward_head(tokens)
        self._end(pixel_values, acting)
        fields = self.converted.fields_of(tokens, head)
        if labels is not None:
            fields = {"loss": self._loss(labels, fields.get("logits")), **fields}
        return self.converted.output(**fields)

    def _loss(self, labels: Tensor, logits: Tensor | None) -> Tensor:
        """Return the model's loss for class numbers, in training with the strategy's own loss."""
        module = self.converted.module
        if logits is None:
            raise UserError(
                f"{type(module).__name__} has no logits, so there is no loss for labels", next_step="leave labels out"
            )
        loss: Tensor = module.loss_function(labels, logits, module.config)
        return loss + self.loss() if self.training else loss

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs: the fields of the model's output."""
        return self.converted.fields

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model with the current weights to a folder, as `save_pretrained` of transformers does.

        Tensors that the strategy learned are not part of it; see `state_dict`.

        Raises:
            UserError: its position embeddings are resampled for another image size than that of its configuration.
        """
        if self.converted.is_resampled:
            raise UserError(
                "position embeddings are resampled for another image size than that of the model's configuration",
                next_step="create the model for this image size, and apply again without image_size",
            )
        self.converted.write_back().save_pretrained(folder)

    def remove(self) -> nn.Module:
        """Remove the strategy, copy the weights back, and return the transformers model."""
        super().remove()
        module: nn.Module = self.converted.write_back()
        return module
