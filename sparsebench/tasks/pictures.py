"""What all tasks of pictures share: how a network is trained on them."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from sparsebench.tasks.base import Inputs, Recipe, Task


class PictureTask(Task):
    """Pictures with classes. Recipe: AdamW with cosine decay.

    Attributes:
        training: names of the parameters that are about training and measuring: they do not touch what is drawn.
    """

    inputs: ClassVar[Inputs] = "images"
    default_model: ClassVar[str] = "vit"
    training: ClassVar[frozenset[str]] = frozenset({"epochs", "batch", "lr", "weight_decay", "watch", "spuriosity"})

    test: int = Field(400, gt=0, description="test images")
    epochs: int = Field(5, gt=0, description="passes over the training images")
    batch: int = Field(64, gt=0, description="images a step")
    lr: float = Field(1e-3, gt=0, description="largest step size")
    weight_decay: float = Field(0.05, ge=0, description="AdamW's weight decay")
    watch: int = Field(0, ge=0, description="steps between looks at network and test set while training; 0 for none")
    spuriosity: int = Field(0, ge=0, description="test images on which each token's influence is measured; 0 for none")

    def recipe(self) -> Recipe:
        """See `Task.recipe`."""
        steps = self.epochs * 10**9
        return Recipe(
            "cross-entropy", "adamw", self.lr, self.batch, self.epochs, steps, self.weight_decay, watch=self.watch
        )
